//! Instruction data: records with the model's tokenizer and chat template.

use std::path::Path;
use std::sync::Arc;

use overdrive_datasets::{
    AnswerKey, Batch, ChatFormat, ChatMessage, Dataset, DeduplicateOptions, DeviceLoader,
    EncodeOptions, ExampleCache, InstructionDataset, InstructionEncoder, InstructionOptions,
    InstructionRecord, PackPlan, PackingStrategy, RenderedChat, RowLayout, Selection, SequenceRows,
    Sha256Digest, Tokenizer, cache_dir, tokenizer_digest,
};
use overdrive_distributed::ProcessGroup;
use overdrive_generation::{
    ChatTemplate, ChatTemplateOptions, Error as Refused, Message, ModelFiles, copy_chat_template,
};
use serde_json::Value;
use tch::Device;

use crate::Result;
use crate::arguments::keys_of;
use crate::arguments::{FinetuneArguments, IntervalStrategy, TrainingArguments};
use crate::data::{BatchFill, DataShard, Loading};
use crate::run::{Fingerprints, model_digest};

/// The keys of fine-tuning on which the meaning of an adapter's weights depends.
const ADAPTER_KEYS: [&str; 3] = ["lora_alpha", "lora_r", "use_rslora"];

/// A model's chat template as the [`ChatFormat`] of instruction data.
#[derive(Debug, Clone)]
pub struct TemplateFormat(pub ChatTemplate);

impl ChatFormat for TemplateFormat {
    fn render(
        &self,
        messages: &[ChatMessage],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> std::result::Result<RenderedChat, String> {
        let messages: Vec<Message> = messages.iter().cloned().map(Message::from).collect();
        let options = ChatTemplateOptions {
            add_generation_prompt,
            tools: tools.and_then(Value::as_array).cloned(),
            ..ChatTemplateOptions::default()
        };
        let rendered = self.0.render_with_answers(&messages, &options);
        let (text, answers) = rendered.map_err(|error| error.to_string())?;
        // A template may mark the answers in some of its branches only.
        let answers = answers.filter(|answers| !answers.is_empty());
        Ok(RenderedChat { text, answers })
    }
}

/// The records of a fine-tuning run, encoded with the model's tokenizer and chat template, and split.
#[derive(Debug)]
pub struct InstructionData {
    /// The examples to train on.
    pub train: Arc<InstructionDataset>,
    /// The held-out examples; `None` without evaluation.
    pub validation: Option<Arc<InstructionDataset>>,
    tokenizer: Tokenizer,
    pub(crate) pad_token: u32,
    /// The source of the chat template, if records are formatted with one.
    chat_template: Option<String>,
    /// The questions that the trained model is asked. They are read together with the data, because the files may
    /// change before the run ends.
    questions: Vec<Question>,
}

/// A question of a record, without its answer.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) text: String,
    pub(crate) ids: Vec<i64>,
    /// The token that ends the answer.
    pub(crate) end: Option<i64>,
}

impl InstructionData {
    /// Reads the files that `data` names with the tokenizer of the model's folder or GGUF file, and passes log lines to
    /// `say`. `eos_token_ids` are those of the model's configuration, for a tokenizer without one.
    ///
    /// The tokens of the records are kept in the cache folder (`tokens` of [`cache_dir`]), so the next run on the same
    /// records with the same tokenizer, template and options reads them ([`InstructionDataset::open_cached`]).
    ///
    /// # Errors
    /// An error if a file cannot be read, a record is invalid, or no example is left to train on.
    pub fn prepare(
        arguments: &FinetuneArguments,
        eos_token_ids: &[i64],
        say: impl FnMut(&str),
    ) -> Result<Self> {
        Self::prepare_in(&cache_dir("tokens")?, arguments, eos_token_ids, say)
    }

    /// As [`prepare`](Self::prepare), with a cache folder of the caller's choice.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn prepare_in(
        cache: &Path,
        arguments: &FinetuneArguments,
        eos_token_ids: &[i64],
        mut say: impl FnMut(&str),
    ) -> Result<Self> {
        let reader = RecordReader::open(cache, arguments, eos_token_ids, &mut say)?;
        let all = reader.read(arguments, AnswerKey::Response, &mut say)?;
        let [all] = match arguments.training.remove_duplicates {
            true => without_duplicates([all], &mut say)?,
            false => [all],
        };
        reader.split(arguments, &all, &mut say)
    }

    /// Returns the tokenizer of the model.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns held-out questions, or training questions if none are held out, at most `samples` of them.
    pub(crate) fn questions(&self) -> &[Question] {
        &self.questions
    }

    /// Returns the source of the chat template, if records are formatted with one.
    pub(crate) fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Returns an endless loader of the training batches, prepared by `dataloader_num_workers` threads.
    ///
    /// # Errors
    /// An error if an option is outside its range, or if there is no full batch and `dataloader_drop_last` is
    /// set.
    pub fn train_loader(
        &self,
        arguments: &FinetuneArguments,
        shard: impl Into<DataShard>,
    ) -> Result<DeviceLoader<Batch>> {
        let (rows, layout, lengths) = self.rows(arguments)?;
        Loading::new(&arguments.training, shard, true).of_rows(rows, layout, lengths)
    }

    /// Returns the shares of tokens in the batches of an epoch and in its rows, and the number of tokens in the longest
    /// row.
    ///
    /// # Errors
    /// An error if an option is outside its range.
    pub fn fill(&self, arguments: &FinetuneArguments) -> Result<(BatchFill, u64)> {
        let (rows, layout, lengths) = self.rows(arguments)?;
        let how = Loading::new(&arguments.training, Device::Cpu, true);
        let plan = rows.plan();
        let longest = (0..plan.len()).map(|row| plan.row_tokens(row)).max();
        let fill = how.fill(plan, layout, lengths)?;
        Ok((fill, longest.unwrap_or(1).max(1) as u64))
    }

    fn rows(&self, arguments: &FinetuneArguments) -> Result<TrainRows> {
        let training = &arguments.training;
        let plan = training.pack_plan(self.train.lengths())?;
        let length = |row| u32::try_from(plan.row_tokens(row)).unwrap_or(u32::MAX);
        let lengths = training.group_by_length;
        let lengths = lengths.then(|| (0..plan.len()).map(length).collect());
        let rows = SequenceRows::new(Arc::clone(&self.train), Arc::new(plan));
        Ok((rows, training.row_layout(self.pad_token), lengths))
    }

    /// Returns a loader of the held-out examples, concatenated without padding, of at most `max_eval_batches`
    /// batches over all processes. `None` without evaluation.
    ///
    /// # Errors
    /// As [`train_loader`](Self::train_loader).
    pub fn validation_loader(
        &self,
        arguments: &FinetuneArguments,
        shard: impl Into<DataShard>,
    ) -> Result<Option<DeviceLoader<Batch>>> {
        let Some(validation) = &self.validation else {
            return Ok(None);
        };
        let training = &arguments.training;
        let rows = validation.len().min(training.max_eval_rows());
        let lengths = &validation.lengths()[..rows];
        let plan = Arc::new(PackPlan::one_each(lengths, training.context())?);
        let rows = SequenceRows::new(Arc::clone(validation), plan);
        let how = Loading::new(&arguments.training, shard, false);
        how.of_rows(rows, RowLayout::EndToEnd, None).map(Some)
    }

    /// Copies the tokenizer's files and the chat template into the folder `to`.
    ///
    /// # Errors
    /// An error if a file cannot be copied.
    pub fn copy_tokenizer(&self, arguments: &FinetuneArguments, to: &Path) -> Result<()> {
        ModelFiles::open(&arguments.model_name_or_path)?.copy_tokenizer(to)?;
        if let Some(path) = &arguments.chat_template_path {
            copy_chat_template(path, to)?;
        }
        Ok(())
    }
}

impl InstructionData {
    /// Returns the fingerprints of a fine-tuning run on this data, and compares them as [`TextData::fingerprints`](crate::TextData::fingerprints)
    /// does. The model that is fine-tuned is identified by its configuration and a sample of its weights.
    ///
    /// # Errors
    /// Those of [`TextData::fingerprints`](crate::TextData::fingerprints), and an error if a file of the model cannot be read.
    pub fn fingerprints(
        &self,
        arguments: &FinetuneArguments,
        group: &ProcessGroup,
    ) -> Result<Fingerprints> {
        let training = &arguments.training;
        let mut all = training.order_fingerprints()?;
        all.set("data", self.train.content_digest());
        all.set("remove_duplicates", training.remove_duplicates);
        // Records whose tokens have no label are left out.
        all.set("completion_only_loss", arguments.completion_only_loss);
        all.set("assistant_only_loss", arguments.assistant_only_loss);
        if training.eval_strategy == IntervalStrategy::No {
            // Without evaluation nothing is held out.
            all.set("validation_fraction", "0, because eval_strategy is no");
        }
        all.set("tokenizer", tokenizer_digest(self.tokenizer())?);
        let template = self.chat_template().unwrap_or(&arguments.prompt_template);
        all.set("chat_template", Sha256Digest::of(template.as_bytes()));
        let model = &arguments.model_name_or_path;
        all.set("model_name_or_path", model_digest(model)?);
        all.set("use_peft", arguments.use_peft);
        if arguments.use_peft {
            let values = keys_of(arguments)?;
            all.set_keys(&values, &ADAPTER_KEYS);
        }
        all.compared(group, training)
    }
}

/// A reader of records with the tokenizer and the chat template of a model.
pub(crate) struct RecordReader {
    tokenizer: Tokenizer,
    chat: Option<Arc<dyn ChatFormat>>,
    /// The source of the chat template.
    sources: Option<String>,
    cache: ExampleCache,
    end: Option<u32>,
    pad: Option<u32>,
}

impl RecordReader {
    /// Opens the files of the model, and passes a line about the format of the records to `say`.
    pub(crate) fn open(
        cache: &Path,
        arguments: &FinetuneArguments,
        eos_token_ids: &[i64],
        say: &mut dyn FnMut(&str),
    ) -> Result<Self> {
        let files = ModelFiles::open(&arguments.model_name_or_path)?;
        let tokenizer = files.tokenizer()?;
        let chat = chat_template(arguments, &files)?;
        let sources = chat.as_ref().map(|chat| {
            let sources = chat.names().filter_map(|name| chat.source(name));
            sources.collect::<String>()
        });
        let cache = ExampleCache {
            folder: cache.to_owned(),
            format: format_digest(chat.as_ref()),
        };
        let chat = chat.map(|template| Arc::new(TemplateFormat(template)) as Arc<dyn ChatFormat>);
        // The tokenizer's end token takes precedence: a model may list several ids, only one of which ends a turn.
        let named = files.special_token("eos_token")?;
        let named = named.and_then(|text| tokenizer.token_to_id(&text));
        let end = named.or_else(|| eos_token_ids.first().and_then(|&id| u32::try_from(id).ok()));
        let pad = files.special_token("pad_token")?;
        let pad = pad.and_then(|text| tokenizer.token_to_id(&text));
        say(match &chat {
            Some(_) => "records     formatted with the model's chat template",
            None => "records     formatted plainly: the model has no chat template",
        });
        Ok(Self {
            tokenizer,
            chat,
            sources,
            cache,
            end,
            pad,
        })
    }

    /// Reads the records of the files that `data` names, each with the answer that `answer` names, and passes a report to
    /// `say`.
    pub(crate) fn read(
        &self,
        arguments: &FinetuneArguments,
        answer: AnswerKey,
        say: &mut dyn FnMut(&str),
    ) -> Result<InstructionDataset> {
        let encoder = InstructionEncoder::new(
            self.tokenizer.clone(),
            self.chat.clone(),
            self.end,
            EncodeOptions {
                max_seq_length: match splits_long_examples(&arguments.training) {
                    true => usize::MAX,
                    false => arguments.training.context(),
                },
                completion_only_loss: arguments.completion_only_loss,
                assistant_only_loss: arguments.assistant_only_loss,
                prompt_template: arguments.prompt_template.clone(),
            },
        )?;
        let options = InstructionOptions {
            on_bad_record: arguments.on_bad_record,
            max_records: arguments.max_train_samples,
            answer,
        };
        let data = &arguments.training.data;
        let tells_time = self
            .sources
            .as_ref()
            .is_some_and(|text| text.contains(CLOCK));
        let all = match tells_time {
            true => InstructionDataset::open(data, encoder, options)?,
            false => InstructionDataset::open_cached(data, encoder, options, &self.cache)?,
        };
        say(&format!("            {}", all.report()));
        say(&match (all.cached_bytes(), all.was_cached()) {
            (None, _) => format!("            not cached: the chat template calls `{CLOCK}`"),
            (Some(_), true) => "            tokens read from the cache".to_owned(),
            (Some(bytes), false) => {
                format!(
                    "            tokens written to the cache, {:.1} MB",
                    bytes as f64 / 1e6
                )
            }
        });
        Ok(all)
    }

    /// Splits the examples into training and held-out examples. The split depends only on the arguments and the number
    /// of examples.
    pub(crate) fn split(
        &self,
        arguments: &FinetuneArguments,
        all: &InstructionDataset,
        say: &mut dyn FnMut(&str),
    ) -> Result<InstructionData> {
        let seed = arguments.training.seed;
        let (train, validation) = match arguments.training.eval_strategy {
            // Without evaluation nothing is held out, so every record is trained on.
            IntervalStrategy::No => (all.clone(), None),
            _ => {
                let (train, held) = all.split(arguments.training.validation_fraction, seed)?;
                say(&format!(
                    "            {} to train on, {} held out",
                    train.len(),
                    held.len()
                ));
                (train, Some(Arc::new(held)))
            }
        };
        let questions = questions(arguments, validation.as_deref().unwrap_or(&train))?;
        Ok(InstructionData {
            questions,
            train: Arc::new(train),
            validation,
            // Many tokenizers have no padding token; padded positions have no label, so any token will do.
            pad_token: self.pad.or(self.end).unwrap_or(0),
            tokenizer: self.tokenizer.clone(),
            chat_template: self.sources.clone(),
        })
    }
}

/// Returns the questions of evenly spaced records, at most `samples` of them.
fn questions(arguments: &FinetuneArguments, records: &InstructionDataset) -> Result<Vec<Question>> {
    let mut questions = Vec::new();
    let wanted = usize::try_from(arguments.training.samples).unwrap_or(usize::MAX);
    let every = (records.len() / wanted.max(1)).max(1);
    for index in (0..records.len()).step_by(every) {
        if questions.len() == wanted {
            break;
        }
        let asked = records.encoder().prompt(&records.record(index)?);
        let Some((text, ids)) = asked.map_err(Refused::Conversation)? else {
            continue;
        };
        if ids.is_empty() || ids.len() >= arguments.training.context() {
            continue;
        }
        let end = records.get(index)?.labels.last().copied();
        let end = end.filter(|&id| id >= 0);
        questions.push(Question { text, ids, end });
    }
    Ok(questions)
}

/// Returns `true` if the packing splits examples that are longer than a row; they must then not be truncated earlier.
fn splits_long_examples(training: &TrainingArguments) -> bool {
    training.packing && training.packing_strategy != PackingStrategy::Bfd
}

/// The function of chat templates that returns the time. The tokens of such a template differ from day to day, so they
/// are not cached.
const CLOCK: &str = "strftime_now";

/// Returns the digest of a chat template with its special tokens.
fn format_digest(template: Option<&ChatTemplate>) -> Sha256Digest {
    let Some(template) = template else {
        return Sha256Digest::UNKNOWN;
    };
    let sources = template.names().map(|name| (name, template.source(name)));
    let names =
        ["bos", "eos", "unk", "sep", "pad", "cls", "mask"].map(|name| format!("{name}_token"));
    let tokens = names.map(|name| template.special_token(&name).map(str::to_owned));
    // The Debug format escapes strings, so different templates have different texts.
    let text = format!("{:?} {tokens:?}", sources.collect::<Vec<_>>());
    Sha256Digest::of(text.as_bytes())
}

/// The training rows, their layout in a batch, and the lengths by which they are grouped.
type TrainRows = (
    SequenceRows<Arc<InstructionDataset>>,
    RowLayout,
    Option<Vec<u32>>,
);

/// The stored records, each with the answers that all of the datasets read.
struct Records<const N: usize>([InstructionDataset; N]);

impl<const N: usize> Dataset for Records<N> {
    type Item = Vec<InstructionRecord>;

    fn len(&self) -> usize {
        self.0.first().map_or(0, Dataset::len)
    }

    fn get(&self, index: usize) -> overdrive_datasets::Result<Vec<InstructionRecord>> {
        self.0.iter().map(|answers| answers.record(index)).collect()
    }

    fn prefetch(&self, indices: &[usize]) {
        self.0.iter().for_each(|answers| answers.prefetch(indices));
    }

    fn check_unchanged(&self) -> overdrive_datasets::Result<()> {
        self.0.iter().try_for_each(Dataset::check_unchanged)
    }
}

/// Removes records that are equal to an earlier one from several datasets over the same records.
pub(crate) fn without_duplicates<const N: usize>(
    all: [InstructionDataset; N],
    say: &mut dyn FnMut(&str),
) -> Result<[InstructionDataset; N]> {
    // The Debug format escapes strings, so different records have different keys.
    let key = |records: &Vec<InstructionRecord>| format!("{records:?}").into_bytes();
    let records = Records(all.clone());
    let unique = Selection::deduplicate(records, key, &DeduplicateOptions::default())?;
    let kept: Vec<usize> = (0..unique.records.len())
        .filter_map(|index| unique.records.source_index(index))
        .collect();
    say(&format!(
        "            {} records equal to an earlier one removed",
        unique.duplicates
    ));
    let mut all = all;
    for answers in &mut all {
        *answers = answers.subset(&kept)?;
    }
    Ok(all)
}

fn chat_template(
    arguments: &FinetuneArguments,
    files: &ModelFiles,
) -> Result<Option<ChatTemplate>> {
    let template = match &arguments.chat_template_path {
        Some(path) => files.chat_template_from(path)?,
        None if !arguments.apply_chat_template => return Ok(None),
        None => match files.chat_template() {
            Err(overdrive_generation::Error::NoChatTemplate { .. }) => return Ok(None),
            template => template?,
        },
    };
    Ok(Some(template))
}
