"""torch.optim shells over `tailopt.clipping`: BiClip, L2Clip, and checkpoints by parameter name."""
