"""torch.optim classes over `tailopt.clipping`: BiClip, L2Clip, Clipped, and checkpoints by parameter name."""
