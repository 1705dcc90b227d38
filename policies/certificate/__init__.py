"""What shows that a change of settings did not change what is trained, and how it is checked."""
