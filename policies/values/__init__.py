"""Values passed between the parts of autotune: frozen and serialisable."""
