//! The keys of Overdrive, in the order of the help.

use super::Harmless::{Any, Only};
use super::Reader::{Both, Finetune, Train};
use super::range::Range::{
    self, AtLeast, AtMost, BelowOne, Between, Fraction, NotNegative, Positive, Seconds, Steps,
    StepsOrZero,
};
use super::{Key, key};

const FREE: Range = Range::Any;
const HAS_TOKENIZER: &str = "leave it out: the tokenizer of the model is used";
const TRAINED: &str =
    "trainable weights cannot be quantized; fine-tuning trains adapters beside quantized weights";

/// The rows, under the headings of the help: the program that reads the key, its name, the value of its flag,
/// its range and its help. Defaults are not written here: they are taken from the presets and `Default`. A
/// help that ends with `[default: …]` describes the effect of a missing value.
// Each row is on one line, so that the table can be read as a table.
#[rustfmt::skip]
pub(super) static KEYS: &[(&str, &[Key])] = &[
    ("Configuration", &[
        key(Train, "preset", "PRESET", FREE, "Configuration to start from [default: the file's, else tiny]")
            .instead("leave it out: the model determines its shape"),
        key(Finetune, "model_name_or_path", "PATH", FREE, "Model to fine-tune: GGUF file, folder with config.json, weights, tokenizer.json, or name on the Hugging Face hub")
            .flag("model").also(&["model", "base_model", "model_name"])
            .instead("`train` creates a model from scratch, see `model`"),
        key(Both, "output_dir", "DIR", FREE, "Folder of the run [default: a new one under runs/]").flag("out").also(&["out_dir", "checkpoint_dir"]),
        key(Both, "overwrite_output_dir", "", FREE, "Replace an existing run in the folder, unless it is running").flag("overwrite"),
        key(Both, "seed", "N", FREE, "Seed of the weights, the order of the data and the samples"),
    ]),
    ("Data", &[
        key(Both, "data", "PATH", FREE, "Text to train on: files or folders of text, JSON Lines, CSV, Parquet, or of tokens (`tokenize`, .bin of nanoGPT and llm.c) [default: the Rust sources that Cargo keeps]")
            .paths().also(&["train_file", "dataset_path", "data_path", "dataset"])
            .finetune("Records to train on: JSON Lines (or a JSON array) with `prompt` and `response`, `messages`, `instruction` and `output`, or `text`"),
        key(Train, "dataset_text_field", "NAME", FREE, "Column or field of a record that holds its text")
            .flag("text-column").also(&["text_column", "text_column_name", "text_field"]).harmless(Only("\"text\""))
            .instead("the format of a record is recognized by its field names: call the field `text`"),
        key(Train, "sample_by", "NAME", FREE, "Unit of a text file that is a document").instead("leave it out: files of records have records"),
        key(Both, "remove_duplicates", "", FREE, "Remove documents that are equal to an earlier one").also(&["deduplicate"]),
        key(Both, "validation_fraction", "FRACTION", Between, "Fraction of the documents that is held out for validation")
            .instead("0.05 is a good start"),
        key(Finetune, "max_train_samples", "N", AtLeast(1), "Maximum number of records [default: all]").also(&["max_samples"]),
        key(Finetune, "on_bad_record", "NAME", FREE, "Action on an invalid record").harmless(Only("\"stop\"")),
        key(Train, "tokenizer", "FILE", FREE, "A tokenizer.json [default: a byte-level BPE trained on the data]").instead(HAS_TOKENIZER),
        key(Train, "vocab_size", "N", FREE, "Vocabulary size of the tokenizer that is trained").instead(HAS_TOKENIZER),
        key(Both, "context_length", "N", AtLeast(1), "Number of tokens in a training sequence (also --max-seq-length)")
            .also(&["max_seq_length", "max_length", "block_size", "ctx_len", "ctx_length", "context_len", "seq_len", "max_seq_len", "sequence_length"])
            .finetune("Maximum number of tokens in an example, at most the context of the model (also --max-seq-length)"),
        key(Train, "sequences", "NAME", FREE, "Kind of a training sequence: a window of the concatenated documents, or a document [default: windows]")
            .harmless(Only("\"documents\"")).instead("each example is a sequence: drop the key, and write `packing: true` for rows without padding"),
        key(Both, "packing", "", FREE, "Pack as many documents into a row as fit").excludes("group_by_length"),
        key(Both, "packing_strategy", "NAME", FREE, "Assignment of documents to packed rows"),
        key(Both, "padding_free", "", FREE, "Concatenate the documents of a batch instead of padding them"),
        key(Both, "pad_to_multiple_of", "N", AtLeast(1), "Round the padded length of a batch up to a multiple of this"),
        key(Both, "group_by_length", "", FREE, "Batch documents of similar lengths").excludes("packing"),
        key(Train, "length_column_name", "NAME", FREE, "Column of lengths for --group-by-length instead of token counts")
            .harmless(Only("\"length\"")).instead("the tokens are counted when the file is opened: drop the key, `group_by_length` needs no column"),
        key(Both, "dataloader_num_workers", "N", AtMost(1024), "Number of threads that prepare batches; it does not change the batches").also(&["num_workers"]),
        key(Both, "dataloader_prefetch_factor", "N", AtLeast(1), "Number of batches that each worker prepares ahead [default: 2]").also(&["prefetch_factor"]),
        key(Both, "dataloader_pin_memory", "", FREE, "Copy batches to a GPU from page-locked memory").also(&["pin_memory"]),
        key(Both, "dataloader_drop_last", "", FREE, "Drop the last batch of an epoch if it has fewer rows").also(&["drop_last"]),
    ]),
    ("Records", &[
        key(Finetune, "completion_only_loss", "", FREE, "Compute the loss on the response only, not on the prompt").harmless(Only("false")),
        key(Finetune, "assistant_only_loss", "", FREE, "Compute the loss on the assistant's messages of a conversation only").harmless(Only("false")),
        key(Finetune, "chat_template_path", "PATH", FREE, "Chat template instead of the model's: a .jinja file, or the folder of a model"),
        key(Finetune, "apply_chat_template", "", FREE, "Use the model's chat template if it has one").harmless(Only("false")),
        key(Finetune, "prompt_template", "TEXT", FREE, "Format of a prompt without a chat template"),
    ]),
    ("Model", &[
        key(Train, "model", "", FREE, "The shape of the model: a section with the keys of Hugging Face's LlamaConfig").flag("").instead("leave it out: the model determines its shape"),
        key(Train, "model.model_type", "NAME", FREE, "Architecture; only llama can be trained from scratch"),
        key(Train, "model.hidden_size", "N", AtLeast(1), "Size of the hidden states"),
        key(Train, "model.intermediate_size", "N", AtLeast(1), "Size of the feed-forward layers"),
        key(Train, "model.num_hidden_layers", "N", AtLeast(1), "Number of decoder layers"),
        key(Train, "model.num_attention_heads", "N", AtLeast(1), "Number of query heads"),
        key(Train, "model.num_key_value_heads", "N", AtLeast(1), "Number of key and value heads [default: the number of query heads]"),
        key(Train, "model.head_dim", "N", AtLeast(2), "Size of a head [default: hidden size / query heads]")
            .instead("give an even number, or change `hidden_size` or `num_attention_heads`"),
        key(Train, "model.max_position_embeddings", "N", AtLeast(1), "Maximum sequence length of the model [default: the context length]"),
        key(Train, "model.rope_theta", "X", Positive, "Base of the rotary position embeddings"),
        key(Train, "model.rms_norm_eps", "X", Positive, "Epsilon of RMSNorm"),
        key(Train, "model.initializer_range", "X", Positive, "Standard deviation of the initial weights"),
        key(Train, "model.tie_word_embeddings", "", FREE, "Share the weights of the embedding with the output layer"),
        key(Train, "model.attention_bias", "", FREE, "Add biases to the attention projections"),
        key(Train, "model.mlp_bias", "", FREE, "Add biases to the feed-forward projections"),
    ]),
    ("Training", &[
        key(Both, "max_steps", "N", FREE, "Number of optimizer steps").flag("steps").also(&["steps", "max_iters"]),
        key(Both, "num_train_epochs", "X", FREE, "Number of epochs, instead of a number of steps").flag("epochs").also(&["epochs", "num_epochs"]).excludes("max_steps"),
        key(Both, "per_device_train_batch_size", "N", AtLeast(1), "Number of sequences in a micro-batch, per device")
            .flag("micro-batch-size").also(&["batch_size", "train_batch_size", "micro_batch_size", "per_gpu_train_batch_size"]),
        key(Both, "auto_find_batch_size", "", FREE, "Take the largest micro-batch up to the given one that fits into memory, for the same effective batch"),
        key(Both, "gradient_accumulation_steps", "N", AtLeast(1), "Number of micro-batches in a step")
            .also(&["grad_accum_steps", "grad_accumulation_steps", "gradient_accumulation", "accumulation_steps"]),
        key(Both, "learning_rate", "X", Positive, "Highest learning rate").also(&["lr"]),
        key(Both, "lr_scheduler_type", "NAME", FREE, "Learning-rate schedule").also(&["scheduler", "lr_scheduler", "scheduler_type"]),
        key(Both, "lr_scheduler_kwargs", "JSON", FREE, "Options of the schedule, such as {\"num_cycles\": 2}"),
        key(Both, "warmup_ratio", "FRACTION", Fraction, "Warm-up as a fraction of all steps").excludes("warmup_steps").instead("for a number of steps use `warmup_steps`"),
        key(Both, "warmup_steps", "N", StepsOrZero, "Warm-up in steps, or below 1 as a fraction of all steps").excludes("warmup_ratio"),
        key(Both, "max_grad_norm", "X", NotNegative, "Maximum norm of the gradients, 0 for no clipping").also(&["grad_clip", "gradient_clip", "gradient_clipping", "clip_grad_norm"]),
        key(Both, "optim", "NAME", FREE, "Optimizer").also(&["optimizer"]),
        key(Both, "weight_decay", "X", NotNegative, "Decoupled weight decay of matrices and embeddings; norms and biases have none"),
        key(Both, "decay_embeddings", "", FREE, "Apply the weight decay to embeddings and a tied head too"),
        key(Both, "adam_beta1", "X", BelowOne, "Decay of AdamW's first moment"),
        key(Both, "adam_beta2", "X", BelowOne, "Decay of AdamW's second moment"),
        key(Both, "adam_epsilon", "X", Positive, "AdamW's epsilon"),
        key(Both, "ema_decay", "X", BelowOne, "Decay of an exponential moving average of the weights, which is evaluated and saved as model_ema [default: no average]"),
    ]),
    ("Evaluation and snapshots", &[
        key(Both, "eval_strategy", "NAME", FREE, "Times of an evaluation on the validation data").also(&["evaluation_strategy"]),
        key(Both, "eval_steps", "N", Steps, "Number of steps between evaluations, 0 for none").also(&["eval_interval", "eval_every"]),
        key(Both, "eval_on_start", "", FREE, "Also evaluate before the first step"),
        key(Both, "max_eval_batches", "N", AtLeast(1), "Maximum number of batches in an evaluation [default: all]"),
        key(Both, "per_device_eval_batch_size", "N", AtLeast(1), "Number of sequences in an evaluation batch, per device").also(&["eval_batch_size", "val_batch_size", "per_gpu_eval_batch_size"]),
        key(Both, "save_strategy", "NAME", FREE, "Times of a snapshot; best saves one whenever the metric improves"),
        key(Both, "save_steps", "N", Steps, "Number of steps between snapshots, 0 for none").also(&["save_interval", "save_every", "checkpoint_interval", "checkpoint_every"]),
        key(Both, "save_total_limit", "N", AtLeast(1), "Number of snapshots to keep; the newest and the best are always kept [default: all]").also(&["keep_last", "max_checkpoints"])
            .instead("give 1 or more, or `save_strategy: \"no\"` for no snapshots"),
        key(Both, "resume_from_checkpoint", "true|DIR", FREE, "Resume from the newest snapshot in `--out` (true), or from the one in this folder").also(&["resume", "auto_resume"]),
        key(Both, "resume_with_changes", "", FREE, "Resume although the data, the tokenizer or an argument that the snapshot depends on has changed"),
        key(Both, "load_best_model_at_end", "", FREE, "Load the weights of the best snapshot at the end"),
        key(Both, "metric_for_best_model", "NAME", FREE, "Metric that determines the best snapshot: loss or bits_per_byte [default: loss]"),
        key(Both, "greater_is_better", "", FREE, "Treat greater values of that metric as better"),
        key(Both, "early_stopping_patience", "N", FREE, "Stop after this number of evaluations without improvement [default: never]").also(&["patience", "early_stop_patience"]),
        key(Both, "early_stopping_threshold", "X", FREE, "Minimum improvement that counts").also(&["early_stopping_min_delta", "early_stopping_delta", "min_delta"]),
        key(Both, "samples", "N", FREE, "Number of samples that the trained model generates at the end"),
        key(Finetune, "merge", "", FREE, "Also write the model with the adapter merged into it").harmless(Only("false")),
    ]),
    ("Reports", &[
        key(Both, "logging_steps", "N", Steps, "Number of steps between log lines").also(&["log_interval", "log_every"]),
        key(Both, "report_to", "NAME", FREE, "Destination of the metrics besides metrics.jsonl").names(),
        key(Both, "trace", "FILE", FREE, "Write a Chrome trace of the sixth to eighth step to this file").excludes("emit_nvtx"),
        key(Both, "emit_nvtx", "", FREE, "Mark operators and phases for `nsys profile -t cuda,nvtx`"),
    ]),
    ("Adapters", &[
        key(Finetune, "use_peft", "", FREE, "Train adapters beside the model's weights; if off, all weights are trained").also(&["use_lora"]).harmless(Only("false")),
        key(Finetune, "lora_r", "N", FREE, "Rank of the adapters").also(&["r", "lora_rank"]).harmless(Only("0")),
        key(Finetune, "lora_alpha", "X", FREE, "Scale of the adapters, divided by the rank").harmless(Any),
        key(Finetune, "lora_dropout", "P", FREE, "Dropout probability of the adapters' inputs").harmless(Any),
        key(Finetune, "target_modules", "NAME", FREE, "Linear layers that get adapters: names, a regular expression, or all-linear [default: PEFT's for the architecture]")
            .names().also(&["lora_target_modules"]).harmless(Any),
        key(Finetune, "bias", "NAME", FREE, "Biases that are trained as well").harmless(Any),
        key(Finetune, "use_rslora", "", FREE, "Scale by alpha / sqrt(rank) instead").harmless(Any),
        key(Finetune, "use_dora", "", FREE, "Also train the norms of the weights' rows (DoRA)").harmless(Any),
        key(Finetune, "modules_to_save", "NAME", FREE, "Linear layers that are trained as full copies and saved with the adapter").names().also(&["lora_modules_to_save"]).harmless(Any),
    ]),
    ("Quantization", &[
        key(Finetune, "load_in_4bit", "", FREE, "Quantize the weights of the blocks to 4 bits (QLoRA)").also(&["use_4bit"]).excludes("load_in_8bit").harmless(Only("false")).instead(TRAINED),
        key(Finetune, "load_in_8bit", "", FREE, "Quantize the weights of the blocks to 8 bits (LLM.int8)").also(&["use_8bit"]).excludes("load_in_4bit").harmless(Only("false")).instead(TRAINED),
        key(Finetune, "bnb_4bit_quant_type", "NAME", FREE, "The 4-bit type").also(&["quant_type"]).harmless(Any),
        key(Finetune, "bnb_4bit_use_double_quant", "", FREE, "Also quantize the scales of the blocks").also(&["use_bnb_nested_quant", "use_double_quant", "use_nested_quant"]).harmless(Any),
        key(Finetune, "bnb_4bit_compute_dtype", "NAME", FREE, "Dtype of matmuls with 4-bit weights").also(&["compute_dtype"]).harmless(Any),
        key(Finetune, "llm_int8_threshold", "X", NotNegative, "Magnitude from which a column of activations is computed in full precision").harmless(Any),
        key(Finetune, "llm_int8_skip_modules", "NAME", FREE, "Linear layers that are not quantized [default: the head]").names().harmless(Any),
    ]),
    ("Machine", &[
        key(Both, "gradient_checkpointing", "", FREE, "Recompute the activations of blocks in backward instead of storing them")
            .also(&["use_gradient_checkpointing", "activation_checkpointing", "checkpoint_activations"]),
        key(Both, "gradient_checkpointing_kwargs", "JSON", FREE, "Options of gradient checkpointing, such as {\"schedule\": {\"every_nth\": 2}, \"policy\": \"matmuls\"}"),
        key(Both, "attn_implementation", "NAME", FREE, "Attention kernel"),
        key(Both, "fused_kernels", "", FREE, "Use one fused kernel each for norms, rotary embeddings, gates and the loss"),
        key(Train, "auto_precision", "", FREE, "Train in the recommended precision of the device unless bf16, fp16 or tf32 is given; a resumed run keeps its own")
            .harmless(Only("false")).instead("fine-tuning is in fp32 unless `bf16` or `fp16` is given: drop the key, and give one of them"),
        key(Both, "bf16", "", FREE, "Train in bfloat16 with autocast").also(&["use_bf16"]).excludes("fp16"),
        key(Both, "fp16", "", FREE, "Train in float16 with autocast and loss scaling").also(&["use_fp16"]).excludes("bf16"),
        key(Both, "tf32", "", FREE, "Use TensorFloat-32 for matmuls on CUDA").also(&["use_tf32", "allow_tf32"]),
        key(Both, "use_cpu", "", FREE, "Train on the CPU even if there is a GPU").flag("cpu").also(&["no_cuda"]),
        key(Both, "threads", "N", AtLeast(1), "Number of threads inside one operator [default: libtorch's choice, one per core]"),
        key(Both, "flush_denormals", "", FREE, "Take numbers below 2^-126 for zero on a CPU; Intel's processors take a hundred cycles for each"),
        key(Both, "zero_stage", "N", AtMost(1), "1 shards the optimizer states over the processes (ZeRO-1), 0 does not"),
        key(Both, "ddp_backend", "NAME", FREE, "Communication backend between processes [default: nccl on GPUs, gloo without any]"),
        key(Both, "ddp_bucket_cap_mb", "N", Positive, "Size of a bucket of gradients in MiB [default: 25]"),
        key(Both, "ddp_find_unused_parameters", "", FREE, "Search for parameters that a backward pass does not reach"),
        key(Both, "ddp_static_graph", "", FREE, "Expect each backward pass to use the same parameters as the first"),
        key(Both, "ddp_broadcast_buffers", "", FREE, "Copy the buffers of rank 0 to all processes before each forward pass"),
        key(Both, "ddp_timeout", "S", Seconds, "Timeout of a collective in seconds"),
    ]),
];
