//! The examples `images` and `speech` on the files that they generate.

use std::path::PathBuf;

fn said(run: impl FnOnce(&mut dyn FnMut(&str))) -> String {
    let mut said = String::new();
    run(&mut |line| said += &format!("{line}\n"));
    said
}

#[cfg(feature = "speech")]
#[test]
fn speech_becomes_padded_batches_of_frames_with_transcripts() {
    use crate::speech_example::{Flags, run};
    let folder = tempfile::tempdir().unwrap();
    let flags = |data: Vec<PathBuf>, workers, seed| Flags {
        generate: data.is_empty().then(|| folder.path().to_owned()),
        data,
        folder: None,
        tokenizer: None,
        batch_size: 4,
        workers,
        seed,
        max_duration: None,
    };
    let mut first = Vec::new();
    let said = said(|say| first = run(&flags(Vec::new(), 0, None), say).unwrap());
    assert!(said.contains("clips       12, 0 left out"), "{said}");
    // 0.3 seconds a word, 30 frames.
    let lengths: Vec<i64> = first
        .iter()
        .flat_map(|batch| batch.lengths.clone())
        .collect();
    assert_eq!(lengths, [30, 60, 90, 120, 150, 180].repeat(2));
    assert_eq!(first[0].input_features.size(), [4, 120, 80]);
    let words = Vec::<i64>::try_from(first[0].labels.get(1)).unwrap();
    let words: Vec<u8> = words
        .into_iter()
        .filter_map(|id| u8::try_from(id).ok())
        .collect();
    assert_eq!(String::from_utf8(words).unwrap(), "high middle");
    // A tone is loudest in the filters around it: a high one is not where a low one is.
    let loudest = |batch: usize, row: i64, frame: i64| {
        let frames = first[batch].input_features.get(row).get(frame);
        i64::try_from(frames.argmax(-1, false)).unwrap()
    };
    assert!(loudest(0, 1, 15) > loudest(0, 1, 45));

    // The manifest that was written is read again, in another order, with any number of threads.
    let manifest = folder.path().join("metadata.csv");
    let shuffled = |workers| run(&flags(vec![manifest.clone()], workers, Some(3)), |_| {}).unwrap();
    let (one, two) = (shuffled(0), shuffled(2));
    for (one, two) in one.iter().zip(&two) {
        assert_eq!(
            (&one.input_features, &one.labels),
            (&two.input_features, &two.labels)
        );
    }
    assert_ne!(one[0].lengths, first[0].lengths);

    let none = Flags {
        max_duration: Some(0.0),
        ..flags(vec![manifest], 0, None)
    };
    assert_eq!(
        run(&none, |_| {}).unwrap_err().to_string(),
        "no clip is left: `--max-duration` is 0, and all 12 clips are longer; raise it"
    );
}

#[cfg(feature = "image")]
#[test]
fn images_become_batches_whose_crops_the_seed_determines() {
    use crate::images_example::{Flags, run};
    let folder = tempfile::tempdir().unwrap();
    let flags = |data: Vec<PathBuf>, augment, seed, workers| Flags {
        generate: data.is_empty().then(|| folder.path().to_owned()),
        data,
        image_field: "image".to_owned(),
        text_field: "text".to_owned(),
        size: 32,
        augment,
        seed,
        epochs: 2,
        tokenizer: None,
        pad_token: 0,
        batch_size: 8,
        workers,
    };
    let mut plain = Vec::new();
    let said = said(|say| plain = run(&flags(Vec::new(), false, 1, 0), say).unwrap());
    assert!(
        said.contains("images      24\n") && said.contains("pixels [8, 3, 32, 32]"),
        "{said}"
    );
    assert_eq!(plain.len(), 6);
    let captions = Vec::<i64>::try_from(plain[0].input_ids.get(0)).unwrap();
    let caption: Vec<u8> = captions
        .iter()
        .filter(|&&id| id > 0)
        .map(|&id| id as u8)
        .collect();
    let caption = String::from_utf8(caption).unwrap();
    assert!(
        caption.starts_with("a ") && caption.contains(" on "),
        "{caption}"
    );

    let data = vec![folder.path().join("captions.jsonl")];
    let augmented = |seed, workers| run(&flags(data.clone(), true, seed, workers), |_| {}).unwrap();
    let (first, again, other) = (augmented(1, 0), augmented(1, 2), augmented(2, 0));
    for (first, again) in first.iter().zip(&again) {
        assert_eq!(first.pixel_values, again.pixel_values);
    }
    assert_ne!(first[0].pixel_values, other[0].pixel_values);
    // The order is that of the run without augmentation, and the crops differ.
    assert_eq!(first[0].input_ids, plain[0].input_ids);
    assert_ne!(first[0].pixel_values, plain[0].pixel_values);
}
