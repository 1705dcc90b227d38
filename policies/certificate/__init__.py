"""Certificates that a change of settings did not change what is trained, and their verification."""
