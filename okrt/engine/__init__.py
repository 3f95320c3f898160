"""How a model trains: data parallel, by gradients or by updates."""
