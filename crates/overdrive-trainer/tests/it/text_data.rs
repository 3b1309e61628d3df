//! Text in Parquet files, which only a build with the feature `parquet` reads.

use overdrive_trainer::{TextData, TrainingArguments};

#[test]
fn a_parquet_file_that_cannot_be_read_is_named_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.parquet");
    std::fs::write(&file, "PAR1").unwrap();
    let arguments = TrainingArguments {
        data: vec![file],
        ..TrainingArguments::default()
    };
    let error = TextData::prepare_in(&folder.path().join("cache"), &arguments, |_| {});
    let error = error.unwrap_err().to_string();
    let expected = match cfg!(feature = "parquet") {
        true => "a.parquet cannot be read: ",
        false => "`--features parquet`",
    };
    assert!(error.contains(expected), "{error}");
}
