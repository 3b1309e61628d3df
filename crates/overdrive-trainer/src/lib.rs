//! What a training program needs around its loop: arguments in Hugging Face's words, presets, run folders, interrupts.
