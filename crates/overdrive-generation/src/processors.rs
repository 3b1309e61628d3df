//! What changes scores before a token is chosen, one function each, with the arithmetic of the
//! processors of the same names in transformers. A score of -∞ excludes a token.

use crate::GenerationConfig;

/// Applies all that `config` asks for, in transformers' order. `present` are the ids of prompt and
/// continuation so far, `new` is how many of them are continuation.
pub(crate) fn process(scores: &mut [f32], present: &[i64], new: usize, config: &GenerationConfig) {
    if config.repetition_penalty != 1.0 {
        repetition_penalty(scores, present, config.repetition_penalty as f32);
    }
    if new < config.min_new_tokens {
        exclude(scores, &config.eos_token_id);
    }
    if config.is_greedy() {
        return;
    }
    if config.temperature != 1.0 {
        let temperature = config.temperature as f32;
        scores.iter_mut().for_each(|score| *score /= temperature);
    }
    if config.top_k != 0 {
        top_k(scores, config.top_k);
    }
    if config.top_p < 1.0 {
        top_p(scores, config.top_p as f32);
    }
    if let Some(min_p) = config.min_p {
        self::min_p(scores, min_p as f32);
    }
}

fn repetition_penalty(scores: &mut [f32], present: &[i64], penalty: f32) {
    // Once a token, however often it occurs.
    let mut ids = present.to_vec();
    ids.sort_unstable();
    ids.dedup();
    for id in ids {
        if let Some(score) = usize::try_from(id).ok().and_then(|id| scores.get_mut(id)) {
            *score = if *score < 0.0 {
                *score * penalty
            } else {
                *score / penalty
            };
        }
    }
}

fn exclude(scores: &mut [f32], ids: &[i64]) {
    for id in ids {
        if let Some(score) = usize::try_from(*id).ok().and_then(|id| scores.get_mut(id)) {
            *score = f32::NEG_INFINITY;
        }
    }
}

/// Keeps the `k` best scores, and all that equal the last of them.
fn top_k(scores: &mut [f32], k: usize) {
    if k >= scores.len() {
        return;
    }
    let mut sorted = scores.to_vec();
    let (_, &mut last, _) = sorted.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    for score in scores.iter_mut().filter(|score| **score < last) {
        *score = f32::NEG_INFINITY;
    }
}

/// Excludes the least likely tokens whose probabilities together are at most `1 - p`; one token always
/// stays.
fn top_p(scores: &mut [f32], p: f32) {
    let probabilities = softmax(scores);
    let mut ascending: Vec<usize> = (0..scores.len())
        .filter(|&id| scores[id] > f32::NEG_INFINITY)
        .collect();
    ascending.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]));
    let mut together = 0.0;
    let last = ascending.len().saturating_sub(1);
    for &id in &ascending[..last] {
        together += probabilities[id];
        if together > 1.0 - p {
            break;
        }
        scores[id] = f32::NEG_INFINITY;
    }
}

/// Excludes tokens less likely than `p` times the likeliest.
fn min_p(scores: &mut [f32], p: f32) {
    let probabilities = softmax(scores);
    let threshold = p * probabilities.iter().copied().fold(0.0, f32::max);
    for (score, probability) in scores.iter_mut().zip(probabilities) {
        if probability < threshold {
            *score = f32::NEG_INFINITY;
        }
    }
}

/// Probabilities of scores; -∞ has 0.
pub(crate) fn softmax(scores: &[f32]) -> Vec<f32> {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut values: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f32 = values.iter().sum();
    values.iter_mut().for_each(|value| *value /= sum);
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn processed_scores_equal_those_of_transformers() {
        let text = include_str!("../tests/fixtures/processors.json");
        let cases: Vec<Value> = serde_json::from_str(text).unwrap();
        assert_eq!(cases.len(), 42);
        for case in cases {
            let config = GenerationConfig::from_map(case["config"].as_object().unwrap()).unwrap();
            let mut scores: Vec<f32> = serde_json::from_value(case["scores"].clone()).unwrap();
            let present: Vec<i64> = serde_json::from_value(case["present"].clone()).unwrap();
            let new = case["new"].as_u64().unwrap() as usize;
            process(&mut scores, &present, new, &config);
            let want: Vec<Option<f32>> = serde_json::from_value(case["processed"].clone()).unwrap();
            for (id, (got, want)) in scores.iter().zip(want).enumerate() {
                match want {
                    None => assert_eq!(*got, f32::NEG_INFINITY, "token {id}: {}", case["config"]),
                    Some(want) => {
                        let close = (got - want).abs() <= 1e-6 * want.abs();
                        assert!(close, "token {id}: {got} for {want}: {}", case["config"]);
                    }
                }
            }
        }
    }

    #[test]
    fn one_token_stays_whatever_the_cut() {
        for config in [
            GenerationConfig {
                top_p: 1e-9,
                top_k: 0,
                do_sample: true,
                ..Default::default()
            },
            GenerationConfig {
                top_k: 1,
                do_sample: true,
                ..Default::default()
            },
            GenerationConfig {
                min_p: Some(1.0),
                top_k: 0,
                do_sample: true,
                ..Default::default()
            },
        ] {
            let mut scores = vec![0.1, 2.0, -1.0, 0.3];
            process(&mut scores, &[], 0, &config);
            let left: Vec<_> = (0..4).filter(|&id| scores[id].is_finite()).collect();
            assert_eq!(left, [1]);
        }
    }
}
