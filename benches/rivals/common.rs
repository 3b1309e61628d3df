// Included by each rival's program: the sizes of `Shape::SMALL`, random tokens, and the line that is printed.

pub const VOCAB: usize = 8192;
pub const DIM: usize = 384;
pub const LAYERS: usize = 6;
pub const HEADS: usize = 6;
pub const HIDDEN: usize = 1024;
pub const CONTEXT: usize = 256;
pub const BATCH: usize = 8;
pub const LEARNING_RATE: f64 = 2e-3;
pub const WARMUP: usize = 2;

/// Tokens that look random (a linear congruential generator).
pub struct Tokens(u64);

impl Tokens {
    pub fn new() -> Tokens {
        Tokens(0)
    }

    /// Returns inputs and the tokens after them, `BATCH · CONTEXT` each.
    pub fn batch(&mut self) -> (Vec<i64>, Vec<i64>) {
        let (mut inputs, mut labels) = (Vec::new(), Vec::new());
        for _ in 0..BATCH {
            let row: Vec<i64> = (0..=CONTEXT)
                .map(|_| {
                    self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    ((self.0 >> 33) % VOCAB as u64) as i64
                })
                .collect();
            inputs.extend(&row[..CONTEXT]);
            labels.extend(&row[1..]);
        }
        (inputs, labels)
    }
}

/// Runs `step` a number of times (the first argument, 8), and prints the figures as a line of JSON.
pub fn measure(mut step: impl FnMut(Vec<i64>, Vec<i64>) -> f64) {
    let steps: usize = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(8);
    let (mut tokens, mut seconds, mut losses) = (Tokens::new(), Vec::new(), Vec::new());
    for index in 0..WARMUP + steps {
        let (inputs, labels) = tokens.batch();
        let start = std::time::Instant::now();
        losses.push(step(inputs, labels));
        if index >= WARMUP {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    seconds.sort_by(f64::total_cmp);
    let median = (seconds[seconds.len() / 2] + seconds[(seconds.len() - 1) / 2]) / 2.0;
    println!(
        r#"{{"tokens_per_second": {}, "first_loss": {}, "last_loss": {}}}"#,
        (BATCH * CONTEXT) as f64 / median,
        losses[0],
        losses[losses.len() - 1],
    );
}
