"""`GANModule`, its nets, and what they are conditioned on."""
