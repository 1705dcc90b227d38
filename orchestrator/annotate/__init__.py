"""Annotations: attempts, causes and changed knobs, written into the run that the job's own tracker keeps."""
