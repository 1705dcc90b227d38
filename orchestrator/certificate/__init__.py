"""Whether a certificate holds: read within limits, compared with the files next to it, and replayed."""
