"""What several commands share: their options, and how a run is started, driven and gone on with."""
