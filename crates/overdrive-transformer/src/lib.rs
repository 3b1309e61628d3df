//! Llama- and GPT-2-family models over tch that read and write Hugging Face checkpoints.
