"""What workers speak: our own contract, or another engine's, translated into ours so that nothing above knows of it."""
