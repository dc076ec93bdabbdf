"""A block of a tensor, as torch's distributed checkpoints want it: any other grid can read what it needs of it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Shard(Tensor):
    """What this rank holds, from `offset` on, of a tensor of the shape `whole`. Equal shards are written once."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def of(cls, local: Tensor, whole: tuple[int, ...], offset: tuple[int, ...]) -> Shard:
        """Shares memory with the local tensor, so that what is loaded into it is there."""
        shard = local.detach().as_subclass(cls)
        shard.whole, shard.offset = whole, offset
        return shard

    @property
    def local(self) -> Tensor:
        return self.as_subclass(Tensor)

    def size(self) -> torch.Size:  # type: ignore[override]
        """Of the whole: what is compared with a stored tensor's."""
        return torch.Size(self.whole)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        chunk = self._chunk()
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), torch.Size(self.whole))
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.local

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offset), self.local.size())
