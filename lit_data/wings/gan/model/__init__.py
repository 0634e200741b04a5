"""`GANModule`, its nets, and their conditions."""
