"""Programs that take a framework's real settings, speak its lines and use memory by a formula."""
