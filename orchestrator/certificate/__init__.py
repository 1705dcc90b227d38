"""Whether a certificate holds: read within limits, compared with what lies beside it, and replayed."""
