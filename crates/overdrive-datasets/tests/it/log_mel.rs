//! Log-mel frames are those of Whisper's feature extractor.

use overdrive_datasets::{LogMel, LogMelOptions, SpeechExample, collate_speech};
use serde::Deserialize;
use tch::Kind;

use crate::common::fixture;

#[derive(Deserialize)]
struct Fixture {
    /// 16-bit samples.
    samples: Vec<f32>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    feature_size: usize,
    n_fft: usize,
    hop_length: usize,
    frames: Vec<Vec<f32>>,
}

fn read() -> (Vec<f32>, Vec<Case>) {
    let text = std::fs::read(fixture("speech/log_mel.json")).unwrap();
    let read: Fixture = serde_json::from_slice(&text).unwrap();
    (
        read.samples.iter().map(|sample| sample / 32768.0).collect(),
        read.cases,
    )
}

#[test]
fn frames_are_those_of_whispers_feature_extractor() {
    let (samples, cases) = read();
    assert_eq!(cases.len(), 2);
    for case in cases {
        let options = LogMelOptions {
            feature_size: case.feature_size,
            n_fft: case.n_fft,
            hop_length: case.hop_length,
            ..LogMelOptions::default()
        };
        let frames = LogMel::new(options).unwrap().frames(&samples).unwrap();
        let size = [case.frames.len() as i64, case.feature_size as i64];
        assert_eq!(frames.size(), size);
        let found = Vec::<f32>::try_from(frames.reshape([-1])).unwrap();
        for (found, expected) in found.iter().zip(case.frames.iter().flatten()) {
            // transformers states 1e-5 between its own implementations, and the fixture has five digits.
            assert!((found - expected).abs() < 5e-5, "{found} {expected}");
        }
    }
}

#[test]
fn a_batch_pads_frames_at_the_end_and_marks_them() {
    let (samples, _) = read();
    let mel = LogMel::new(LogMelOptions::default()).unwrap();
    let clip = |samples: &[f32], labels: &[i64]| SpeechExample {
        frames: mel.frames(samples).unwrap(),
        labels: labels.to_vec(),
    };
    let rows = [clip(&samples[..800], &[4, 5]), clip(&samples, &[6])];
    let batch = collate_speech(&rows).unwrap();
    assert_eq!(batch.input_features.size(), [2, 10, 80]);
    assert_eq!(batch.lengths, [5, 10]);
    assert_eq!(batch.padding(), 0.25);
    let first = batch.input_features.get(0);
    assert_eq!(first.narrow(0, 0, 5), rows[0].frames);
    assert_eq!(
        first
            .narrow(0, 5, 5)
            .abs()
            .sum(Kind::Float)
            .double_value(&[]),
        0.0
    );
    let mask = batch.attention_mask.unwrap();
    assert_eq!(
        Vec::<i64>::try_from(mask.sum_dim_intlist(1, false, Kind::Int64)).unwrap(),
        [5, 10]
    );
    let labels = Vec::<i64>::try_from(batch.labels.reshape([-1])).unwrap();
    assert_eq!(labels, [4, 5, 6, -100]);

    assert!(
        collate_speech(&[clip(&samples, &[1])])
            .unwrap()
            .attention_mask
            .is_none()
    );
    assert!(collate_speech(&[]).is_err());
    let other = LogMel::new(LogMelOptions {
        feature_size: 40,
        ..LogMelOptions::default()
    })
    .unwrap();
    let other = SpeechExample {
        frames: other.frames(&samples).unwrap(),
        labels: vec![1],
    };
    let error = collate_speech(&[clip(&samples, &[1]), other])
        .unwrap_err()
        .to_string();
    assert!(error.contains("[10, 40] (row 1)"), "{error}");
}
