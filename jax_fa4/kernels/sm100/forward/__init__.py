"""FlashAttention-4 forward: one file per warp role; ``edges`` declares the pipeline, ``tmem``, ``shared`` the maps."""
