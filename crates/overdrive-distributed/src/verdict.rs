//! What the heartbeats of all ranks say about a collective that failed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A heartbeat.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Beat {
    /// Of heartbeats.
    pub(crate) count: u64,
    /// Of collectives begun.
    pub(crate) started: u64,
    /// Number, name and tensors of the last of them.
    pub(crate) recent: Vec<(u64, String, String)>,
    pub(crate) state: State,
}

impl Beat {
    fn begun(&self, number: u64) -> Option<(&str, &str)> {
        let found = self.recent.iter().find(|(other, _, _)| *other == number);
        found.map(|(_, what, tensors)| (what.as_str(), tensors.as_str()))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum State {
    Running,
    Failed,
    Left,
}

/// What a group has failed of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The ranks at fault, as far as is known.
    pub ranks: Vec<usize>,
    /// What is known of them.
    pub text: String,
}

impl Failure {
    pub(crate) fn unknown(text: &str) -> Self {
        Self {
            ranks: Vec::new(),
            text: text.to_owned(),
        }
    }
}

/// A collective that failed on this rank.
pub(crate) struct Failed<'a> {
    /// 0 for a send or a receive.
    pub(crate) number: u64,
    pub(crate) what: &'a str,
    /// What took part in it here.
    pub(crate) tensors: &'a str,
    /// libtorch's words.
    pub(crate) text: &'a str,
}

/// What is known when it is judged.
pub(crate) struct Evidence<'a> {
    pub(crate) rank: usize,
    /// What each rank is called.
    pub(crate) names: &'a [String],
    pub(crate) beats: &'a BTreeMap<usize, Beat>,
    /// The ranks without a heartbeat for so many seconds.
    pub(crate) silent: &'a [usize],
    pub(crate) waited: f64,
}

impl Evidence<'_> {
    /// The ranks at fault and why.
    pub(crate) fn judge(&self, failed: &Failed<'_>) -> Failure {
        let Failed {
            number,
            what,
            tensors,
            text,
        } = *failed;
        let collective = if number > 0 {
            format!("{what} #{number}")
        } else {
            what.to_owned()
        };
        let running = |beat: &Beat| beat.state == State::Running && number > 0;
        let left = self.having(|beat| beat.state == State::Left);
        let behind = self.having(|beat| running(beat) && beat.started < number);
        let elsewhere = self.differing(|rank| self.call_of(rank, failed));
        let misshapen = self.differing(|rank| self.tensors_of(rank, failed));
        let names = self.names;
        let waited = self.waited;
        let (ranks, found): (Vec<usize>, Vec<String>) = if !self.silent.is_empty() {
            self.each(self.silent.to_vec(), |rank| {
                format!(
                    "{} is lost: no heartbeat for {waited:.1} s (its process was killed or stopped, or \
                     its machine or network is down); {}",
                    names[rank],
                    self.place(rank)
                )
            })
        } else if !left.is_empty() {
            self.each(left, |rank| {
                format!("{} has left the group; {}", names[rank], self.place(rank))
            })
        } else if !behind.is_empty() {
            self.each(behind, |rank| {
                format!(
                    "{} is stuck: it did not begin {collective} in time, though its process is alive; {}",
                    names[rank],
                    self.place(rank)
                )
            })
        } else if let Some((ranks, usual)) = elsewhere {
            self.each(ranks, |rank| {
                let other = self.call_of(rank, failed).unwrap_or("another");
                format!(
                    "{} has gone another way: it has begun {other} #{number}, while {} is in {} #{number}",
                    names[rank],
                    names[usual],
                    self.call_of(usual, failed).unwrap_or(what),
                )
            })
        } else if let Some((ranks, usual)) = misshapen {
            self.each(ranks, |rank| {
                let theirs = self.tensors_of(rank, failed).unwrap_or("other");
                format!(
                    "{} has other tensors in {collective}: {theirs}, while {} has {}",
                    names[rank],
                    names[usual],
                    self.tensors_of(usual, failed).unwrap_or(tensors),
                )
            })
        } else {
            let text = "every rank is alive and has begun it with the same tensors, so the network may be \
                        slower than the timeout";
            (Vec::new(), vec![text.to_owned()])
        };
        Failure {
            ranks,
            text: format!("{} [libtorch: {}]", found.join("; "), text.trim()),
        }
    }

    /// What a rank that is in step has begun under the number of the collective that failed.
    fn begun<'a>(&'a self, rank: usize, failed: &'a Failed<'_>) -> Option<(&'a str, &'a str)> {
        if rank == self.rank {
            return (failed.number > 0).then_some((failed.what, failed.tensors));
        }
        let beat = self.beats.get(&rank)?;
        (beat.state != State::Left && failed.number > 0)
            .then(|| beat.begun(failed.number))
            .flatten()
    }

    fn call_of<'a>(&'a self, rank: usize, failed: &'a Failed<'_>) -> Option<&'a str> {
        self.begun(rank, failed).map(|(what, _)| what)
    }

    fn tensors_of<'a>(&'a self, rank: usize, failed: &'a Failed<'_>) -> Option<&'a str> {
        self.begun(rank, failed).map(|(_, tensors)| tensors)
    }

    /// The ranks that say another thing than most do, and one of those most; of two that are equally many,
    /// the one with the lowest rank. So the verdict does not depend on the rank that comes to it first.
    fn differing<'a>(
        &'a self,
        says: impl Fn(usize) -> Option<&'a str>,
    ) -> Option<(Vec<usize>, usize)> {
        let said: Vec<(usize, &str)> = (0..self.names.len())
            .filter_map(|rank| Some((rank, says(rank)?)))
            .collect();
        let votes = |wanted: &str| said.iter().filter(|(_, text)| *text == wanted).count();
        // `max_by_key` gives the last of equals.
        let &(usual, most) = said.iter().rev().max_by_key(|(_, text)| votes(text))?;
        let differing = said.iter().filter(|(_, text)| *text != most);
        let ranks: Vec<usize> = differing.map(|(rank, _)| *rank).collect();
        (!ranks.is_empty()).then_some((ranks, usual))
    }

    fn having(&self, wanted: impl Fn(&Beat) -> bool) -> Vec<usize> {
        let matching = self.beats.iter().filter(|(_, beat)| wanted(beat));
        matching.map(|(rank, _)| *rank).collect()
    }

    fn each(
        &self,
        ranks: Vec<usize>,
        verdict: impl Fn(usize) -> String,
    ) -> (Vec<usize>, Vec<String>) {
        let texts = ranks.iter().map(|rank| verdict(*rank)).collect();
        (ranks, texts)
    }

    fn place(&self, rank: usize) -> String {
        let last = self.beats.get(&rank).and_then(|beat| beat.recent.last());
        match last {
            Some((number, what, _)) => {
                format!("when last heard of it had begun {what} #{number}")
            }
            None => "when last heard of it had begun no collective".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    /// A collective and its tensors.
    type Call = (&'static str, &'static str);

    /// What `judge` says on `judging` when each rank has begun this as its 4th collective.
    fn verdict(judging: usize, begun: &[Call]) -> Failure {
        let names: Vec<String> = (0..begun.len())
            .map(|rank| format!("rank {rank}"))
            .collect();
        let beat = |(what, tensors): &Call| Beat {
            count: 9,
            started: 4,
            recent: vec![(4, (*what).to_owned(), (*tensors).to_owned())],
            state: State::Running,
        };
        let others = begun
            .iter()
            .enumerate()
            .filter(|(rank, _)| *rank != judging);
        let evidence = Evidence {
            rank: judging,
            names: &names,
            beats: &others.map(|(rank, begun)| (rank, beat(begun))).collect(),
            silent: &[],
            waited: 1.0,
        };
        evidence.judge(&Failed {
            number: 4,
            what: begun[judging].0,
            tensors: begun[judging].1,
            text: "timed out",
        })
    }

    #[test]
    fn every_rank_comes_to_the_same_verdict() {
        let reduce = ("all_reduce", "float [3]");
        let wide = ("all_reduce", "float [4]");
        let send = ("broadcast", "float [3]");
        let cases: [(&[Call], &[usize], &str); 6] = [
            (
                &[reduce, send],
                &[1],
                "rank 1 has gone another way: it has begun broadcast #4, while rank 0 is in all_reduce #4",
            ),
            (
                &[send, reduce, reduce],
                &[0],
                "rank 0 has gone another way: it has begun broadcast #4, while rank 1 is in all_reduce #4",
            ),
            (
                &[reduce, send, reduce, send],
                &[1, 3],
                "rank 3 has gone another way",
            ),
            (
                &[reduce, wide],
                &[1],
                "rank 1 has other tensors in all_reduce #4: float [4], while rank 0 has float [3]",
            ),
            (
                &[wide, reduce, reduce],
                &[0],
                "rank 0 has other tensors in all_reduce #4: float [4], while rank 1 has float [3]",
            ),
            (&[reduce, reduce], &[], "every rank is alive"),
        ];
        for (begun, ranks, words) in cases {
            for judging in 0..begun.len() {
                let failure = verdict(judging, begun);
                assert_eq!(failure.ranks, ranks, "{begun:?} judged by {judging}");
                assert!(failure.text.contains(words), "{}", failure.text);
            }
        }
    }
}
