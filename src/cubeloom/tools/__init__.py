"""Tools for jobs and models besides training: verify, rehearse, emulate, convert, sample, doctor, baselines."""
