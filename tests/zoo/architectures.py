"""Small random models of many architectures, as Hugging Face folders; and some of users and diffusers, as functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import transformers

Family = Literal["decoder", "experts", "encoder", "both", "vision", "other"]
VOCAB, WIDTH, INNER, HEADS, KEYS, LENGTH = 96, 32, 48, 4, 2, 32

# What each name stands for, for the configurations that have it.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "ffn_hidden_size"), INNER),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), INNER),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), LENGTH),
    **dict.fromkeys(("head_dim", "d_kv"), WIDTH // HEADS),
    **dict.fromkeys(("attention_dropout",), 0.0),
    "vocab_size": VOCAB,
    "num_key_value_heads": KEYS,
    "rotary_dim": 4,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_IMAGES = {"image_size": 8, "patch_size": 4, "num_labels": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Architecture:
    kind: str  # as config.json names it
    model: str  # the class
    family: Family
    options: dict[str, Any] = field(default_factory=dict)  # None: not given
    later: dict[str, Any] = field(default_factory=dict)  # attributes that the configuration does not take

    def save(self, folder: Path) -> str:
        """As a folder without weights."""
        make = transformers.CONFIG_MAPPING[self.kind]
        default, aliases = make().to_dict(), dict(make.attribute_map)
        sizes = {name: size for name, size in _SIZES.items() if name in default and not isinstance(default[name], list)}
        sizes |= {name: size for name, size in _SIZES.items() if name in aliases and aliases[name] not in sizes}
        given = {name: value for name, value in {**sizes, **self.options}.items() if value is not None}
        config = make(**given, architectures=[self.model])
        for name, value in self.later.items():
            setattr(config, name, value)
        config.save_pretrained(folder)
        return str(folder)


def _of(family: Family, **models: str) -> dict[str, Architecture]:
    return {kind: Architecture(kind, model, family) for kind, model in models.items()}


_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
_LATENT_HEADS = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": HEADS,
}
_LATENT = {**_ROUTED, **_LATENT_HEADS, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": None}
_LINEAR = {  # attention whose state is of one size, in each other block
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}

ARCHITECTURES: dict[str, Architecture] = {
    **_of(
        "decoder",
        llama="LlamaForCausalLM",
        mistral="MistralForCausalLM",
        qwen2="Qwen2ForCausalLM",
        qwen3="Qwen3ForCausalLM",
        gemma="GemmaForCausalLM",
        phi="PhiForCausalLM",
        phi3="Phi3ForCausalLM",
        olmo="OlmoForCausalLM",
        olmo2="Olmo2ForCausalLM",
        olmo3="Olmo3ForCausalLM",
        gpt_neox="GPTNeoXForCausalLM",
        gpt2="GPT2LMHeadModel",
        opt="OPTForCausalLM",
        falcon="FalconForCausalLM",
        bloom="BloomForCausalLM",
        gptj="GPTJForCausalLM",
        stablelm="StableLmForCausalLM",
        starcoder2="Starcoder2ForCausalLM",
        cohere="CohereForCausalLM",
        cohere2="Cohere2ForCausalLM",
        granite="GraniteForCausalLM",
        mpt="MptForCausalLM",
        persimmon="PersimmonForCausalLM",
        nemotron="NemotronForCausalLM",
        smollm3="SmolLM3ForCausalLM",
        glm="GlmForCausalLM",
        glm4="Glm4ForCausalLM",
        helium="HeliumForCausalLM",
        ernie4_5="Ernie4_5ForCausalLM",
        exaone4="Exaone4ForCausalLM",
        seed_oss="SeedOssForCausalLM",
        arcee="ArceeForCausalLM",
        biogpt="BioGptForCausalLM",
        xglm="XGLMForCausalLM",
        apertus="ApertusForCausalLM",
        gpt_bigcode="GPTBigCodeForCausalLM",
        codegen="CodeGenForCausalLM",
        diffllama="DiffLlamaForCausalLM",
        hunyuan_v1_dense="HunYuanDenseV1ForCausalLM",
        cwm="CwmForCausalLM",
        granite_swa="GraniteSWAForCausalLM",
        jais2="Jais2ForCausalLM",
        hyperclovax="HyperCLOVAXForCausalLM",
        nanochat="NanoChatForCausalLM",
        ministral="MinistralForCausalLM",
        vaultgemma="VaultGemmaForCausalLM",
        bitnet="BitNetForCausalLM",
        lfm2="Lfm2ForCausalLM",
    ),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", "decoder", {"query_pre_attn_scalar": 8}),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", "decoder", {"query_pre_attn_scalar": 8}),
    "falcon, grouped": Architecture(
        "falcon", "FalconForCausalLM", "decoder", {"new_decoder_architecture": True, "num_kv_heads": KEYS}
    ),
    "falcon, alibi": Architecture("falcon", "FalconForCausalLM", "decoder", {"alibi": True, "multi_query": False}),
    "gpt_neo": Architecture("gpt_neo", "GPTNeoForCausalLM", "decoder", {"attention_types": [[["global", "local"], 1]]}),
    "ctrl": Architecture("ctrl", "CTRLLMHeadModel", "decoder", {"dff": INNER}),
    "openai-gpt": Architecture("openai-gpt", "OpenAIGPTLMHeadModel", "decoder"),
    "mixtral": Architecture("mixtral", "MixtralForCausalLM", "experts", {"num_local_experts": 4}),
    "qwen2_moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", "experts", {**_EXPERTS, "shared_expert_intermediate_size": 16}
    ),
    "qwen3_moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", "experts", _EXPERTS),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", "experts", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": Architecture(
        "gpt_oss", "GptOssForCausalLM", "experts", {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "deepseek_v3": Architecture("deepseek_v3", "DeepseekV3ForCausalLM", "experts", _LATENT),
    "qwen3_next": Architecture(
        "qwen3_next", "Qwen3NextForCausalLM", "experts", {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16}
    ),
    "qwen3_5_moe": Architecture("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "experts", {**_EXPERTS, **_LINEAR}),
    "minimax": Architecture("minimax", "MiniMaxForCausalLM", "experts"),
    "glm4_moe": Architecture("glm4_moe", "Glm4MoeForCausalLM", "experts", {**_ROUTED, "first_k_dense_replace": 1}),
    "ernie4_5_moe": Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        "experts",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    ),
    "granitemoe": Architecture(
        "granitemoe", "GraniteMoeForCausalLM", "experts", {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "deepseek_v2": Architecture(
        "deepseek_v2", "DeepseekV2ForCausalLM", "experts", {**_ROUTED, **_LATENT_HEADS, "first_k_dense_replace": 1}
    ),
    "jamba": Architecture(
        "jamba",
        "JambaForCausalLM",
        "other",
        {
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    "qwen3_5": Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", "other", _LINEAR),
    "olmo_hybrid": Architecture("olmo_hybrid", "OlmoHybridForCausalLM", "other"),
    "minicpm3": Architecture("minicpm3", "MiniCPM3ForCausalLM", "other", _LATENT_HEADS),
    "youtu": Architecture("youtu", "YoutuForCausalLM", "other", {**_LATENT_HEADS, "head_dim": 4}),
    "xlm": Architecture("xlm", "XLMWithLMHeadModel", "encoder"),
    "deberta": Architecture("deberta", "DebertaForMaskedLM", "encoder"),
    "deberta_v2": Architecture("deberta-v2", "DebertaV2ForMaskedLM", "encoder"),
    "mamba": Architecture("mamba", "MambaForCausalLM", "other", {"state_size": 4}),
    **_of(
        "encoder",
        bert="BertForMaskedLM",
        distilbert="DistilBertForMaskedLM",
        electra="ElectraForMaskedLM",
        albert="AlbertForMaskedLM",
        convbert="ConvBertForMaskedLM",
        layoutlm="LayoutLMForMaskedLM",
        squeezebert="SqueezeBertForMaskedLM",
        fnet="FNetForMaskedLM",
    ),
    "bert, classes": Architecture("bert", "BertForSequenceClassification", "encoder"),
    "roberta": Architecture("roberta", "RobertaForMaskedLM", "encoder", {"max_position_embeddings": 40}),
    "xlm-roberta": Architecture("xlm-roberta", "XLMRobertaForMaskedLM", "encoder", {"max_position_embeddings": 40}),
    "mpnet": Architecture("mpnet", "MPNetForMaskedLM", "encoder", {"max_position_embeddings": 40}),
    "modernbert": Architecture(
        "modernbert", "ModernBertForMaskedLM", "encoder", {"cls_token_id": 1, "sep_token_id": 2}
    ),
    **_of(
        "both",
        bart="BartForConditionalGeneration",
        mbart="MBartForConditionalGeneration",
        pegasus="PegasusForConditionalGeneration",
        m2m_100="M2M100ForConditionalGeneration",
    ),
    "marian": Architecture(
        "marian", "MarianMTModel", "both", {"decoder_vocab_size": VOCAB, "decoder_start_token_id": 0}
    ),
    "t5": Architecture("t5", "T5ForConditionalGeneration", "both", later={"decoder_start_token_id": 0}),
    "umt5": Architecture("umt5", "UMT5ForConditionalGeneration", "both", later={"decoder_start_token_id": 0}),
    "whisper": Architecture(
        "whisper",
        "WhisperForConditionalGeneration",
        "both",
        {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": LENGTH, "decoder_start_token_id": 1},
    ),
    "vit": Architecture("vit", "ViTForImageClassification", "vision", _IMAGES),
    "deit": Architecture("deit", "DeiTForImageClassification", "vision", _IMAGES),
    "beit": Architecture("beit", "BeitForImageClassification", "vision", _IMAGES),
    "dinov2": Architecture("dinov2", "Dinov2ForImageClassification", "vision", _IMAGES),
    "convnext": Architecture(
        "convnext",
        "ConvNextForImageClassification",
        "vision",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 16, "num_labels": 8},
    ),
}
# One of each family, and of each thing that is rare.
SHORT = ("llama", "gpt2", "falcon", "mixtral", "bert", "t5", "vit")
# Functions of files beside this one.
FUNCTIONS = {
    "a user's GPT": "nano.py:nano_gpt",
    "UNet2DModel of diffusers": "diffusion.py:unet",
    "UNet2DConditionModel of diffusers": "diffusion.py:unet_with_text",
    "DiTTransformer2DModel of diffusers": "diffusion.py:dit",
    "SD3Transformer2DModel of diffusers": "diffusion.py:stable_diffusion_3",
    "PixArtTransformer2DModel of diffusers": "diffusion.py:pixart",
    "AutoencoderKL of diffusers": "diffusion.py:autoencoder",
    "ViT of timm": "vision.py:timm_vit",
    "DeiT III of timm": "vision.py:timm_deit",
    "DeiT, distilled, of timm": "vision.py:timm_deit_distilled",
    "BEiT of timm": "vision.py:timm_beit",
    "EVA-02 of timm": "vision.py:timm_eva",
    "Swin of timm": "vision.py:timm_swin",
    "MLP-Mixer of timm": "vision.py:timm_mixer",
    "ConvNeXt of timm": "vision.py:timm_convnext",
    "ResNet of timm": "vision.py:timm_resnet",
    "EfficientNet of timm": "vision.py:timm_efficientnet",
    "MobileNetV3 of timm": "vision.py:timm_mobilenet",
    "NFNet of timm": "vision.py:timm_nfnet",
    "ResNet of torchvision": "vision.py:resnet",
    "ResNeXt of torchvision": "vision.py:resnext",
    "VGG of torchvision": "vision.py:vgg",
    "MobileNetV2 of torchvision": "vision.py:mobilenet",
    "DenseNet of torchvision": "vision.py:densenet",
    "EfficientNet of torchvision": "vision.py:efficientnet",
    "SqueezeNet of torchvision": "vision.py:squeezenet",
    "ConvNeXt of torchvision": "vision.py:convnext",
    "ViT of torchvision": "vision.py:vit",
    "Swin of torchvision": "vision.py:swin",
    "MaxVit of torchvision": "vision.py:maxvit",
}


SHORT_FUNCTIONS = ("a user's GPT", "ResNet of timm", "MobileNetV2 of torchvision", "DiTTransformer2DModel of diffusers")


def name_of(architecture: str, folder: Path) -> str:
    """What a command is given as its model; a folder for it is written where it needs one."""
    if architecture in FUNCTIONS:
        return str(Path(__file__).parent / FUNCTIONS[architecture])
    return ARCHITECTURES[architecture].save(folder / architecture)
