"""What is done with jobs and models beside training them: verify, rehearse, emulate, convert, sample, doctor, baselines."""
