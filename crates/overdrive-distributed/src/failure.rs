//! The cause of a failed collective, from the heartbeats of all ranks.

use std::collections::BTreeMap;

use overdrive_sys::c10d::StartedCollective;
use serde::{Deserialize, Serialize};

/// A heartbeat of a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Heartbeat {
    /// The number of heartbeats sent.
    pub(crate) count: u64,
    /// The number of collectives started.
    pub(crate) started: u64,
    /// The latest collectives.
    pub(crate) recent: Vec<Started>,
    pub(crate) state: State,
}

/// [`StartedCollective`] in a heartbeat.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Started {
    pub(crate) number: u64,
    pub(crate) what: String,
    pub(crate) tensors: String,
}

impl From<&StartedCollective> for Started {
    fn from(started: &StartedCollective) -> Started {
        Started {
            number: started.number,
            what: started.what.clone(),
            tensors: started.tensors.clone(),
        }
    }
}

impl Heartbeat {
    fn collective(&self, number: u64) -> Option<(&str, &str)> {
        let found = self.recent.iter().find(|started| started.number == number);
        found.map(|started| (started.what.as_str(), started.tensors.as_str()))
    }
}

/// The state of a rank.

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum State {
    Running,
    Failed,
    Left,
}

/// The cause for which a group has failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Failure {
    /// The ranks at fault, as far as is known.
    pub ranks: Vec<usize>,
    /// A description of the cause.
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
pub(crate) struct FailedCollective<'a> {
    /// The number of the collective; 0 for a send or a receive.
    pub(crate) number: u64,
    pub(crate) what: &'a str,
    /// The tensors that this rank passed to it.
    pub(crate) tensors: &'a str,
    /// The error message of libtorch.
    pub(crate) text: &'a str,
}

/// The information from which the cause is derived.
pub(crate) struct Evidence<'a> {
    pub(crate) rank: usize,
    /// The name of each rank in messages.
    pub(crate) names: &'a [String],
    pub(crate) heartbeats: &'a BTreeMap<usize, Heartbeat>,
    /// The ranks without a heartbeat for `waited` seconds.
    pub(crate) silent: &'a [usize],
    pub(crate) waited: f64,
}

impl Evidence<'_> {
    /// Returns the ranks at fault and the cause.
    pub(crate) fn verdict(&self, failed: &FailedCollective<'_>) -> Failure {
        let FailedCollective {
            number,
            what,
            tensors,
            text,
        } = *failed;
        // Sends and receives are not numbered: only two ranks take part in one.
        let collective = if number > 0 {
            format!("{what} #{number}")
        } else {
            what.to_owned()
        };
        let running = |heartbeat: &Heartbeat| heartbeat.state == State::Running && number > 0;
        let left = self.ranks_where(|heartbeat| heartbeat.state == State::Left);
        let behind = self.ranks_where(|heartbeat| running(heartbeat) && heartbeat.started < number);
        let other_calls = self.minority(|rank| self.call_of(rank, failed));
        let other_tensors = self.minority(|rank| self.tensors_of(rank, failed));
        let names = self.names;
        let waited = self.waited;
        // From the strongest evidence to the weakest: a rank that is gone also looks stuck.
        let (ranks, found): (Vec<usize>, Vec<String>) = if !self.silent.is_empty() {
            self.each(self.silent.to_vec(), |rank| {
                format!(
                    "{} is lost: no heartbeat for {waited:.1} s (its process was killed or stopped, or \
                     its machine or network is down); {}",
                    names[rank],
                    self.last_seen(rank)
                )
            })
        } else if !left.is_empty() {
            self.each(left, |rank| {
                format!(
                    "{} has left the group; {}",
                    names[rank],
                    self.last_seen(rank)
                )
            })
        } else if !behind.is_empty() {
            self.each(behind, |rank| {
                format!(
                    "{} is stuck: its process is alive, but did not start {collective} in time; {}",
                    names[rank],
                    self.last_seen(rank)
                )
            })
        } else if let Some((ranks, usual)) = other_calls {
            self.each(ranks, |rank| {
                let other = self.call_of(rank, failed).unwrap_or("another");
                format!(
                    "{} called another collective: {other} #{number}, while {} called {} #{number}",
                    names[rank],
                    names[usual],
                    self.call_of(usual, failed).unwrap_or(what),
                )
            })
        } else if let Some((ranks, usual)) = other_tensors {
            self.each(ranks, |rank| {
                let theirs = self.tensors_of(rank, failed).unwrap_or("other");
                format!(
                    "{} passed other tensors to {collective}: {theirs}, while {} passed {}",
                    names[rank],
                    names[usual],
                    self.tensors_of(usual, failed).unwrap_or(tensors),
                )
            })
        } else {
            let text = "every rank is alive and has started it with the same tensors, so the network may \
                        be slower than the timeout";
            (Vec::new(), vec![text.to_owned()])
        };
        Failure {
            ranks,
            text: format!("{} [libtorch: {}]", found.join("; "), text.trim()),
        }
    }

    /// Returns the collective that a rank started under the number of the one that failed.
    fn started<'a>(
        &'a self,
        rank: usize,
        failed: &'a FailedCollective<'_>,
    ) -> Option<(&'a str, &'a str)> {
        if rank == self.rank {
            return (failed.number > 0).then_some((failed.what, failed.tensors));
        }
        let heartbeat = self.heartbeats.get(&rank)?;
        (heartbeat.state != State::Left && failed.number > 0)
            .then(|| heartbeat.collective(failed.number))
            .flatten()
    }

    fn call_of<'a>(&'a self, rank: usize, failed: &'a FailedCollective<'_>) -> Option<&'a str> {
        self.started(rank, failed).map(|(what, _)| what)
    }

    fn tensors_of<'a>(&'a self, rank: usize, failed: &'a FailedCollective<'_>) -> Option<&'a str> {
        self.started(rank, failed).map(|(_, tensors)| tensors)
    }

    /// Returns the ranks whose value differs from that of the majority, and one rank of the majority. Of two
    /// values that are equally frequent, that of the lowest rank counts, so that the verdict does not depend
    /// on the rank that derives it.
    fn minority<'a>(
        &'a self,
        value: impl Fn(usize) -> Option<&'a str>,
    ) -> Option<(Vec<usize>, usize)> {
        let values: Vec<(usize, &str)> = (0..self.names.len())
            .filter_map(|rank| Some((rank, value(rank)?)))
            .collect();
        let votes = |wanted: &str| values.iter().filter(|(_, text)| *text == wanted).count();
        // Reversed, because `max_by_key` returns the last of equal ones.
        let &(usual, majority) = values.iter().rev().max_by_key(|(_, text)| votes(text))?;
        let differing = values.iter().filter(|(_, text)| *text != majority);
        let ranks: Vec<usize> = differing.map(|(rank, _)| *rank).collect();
        (!ranks.is_empty()).then_some((ranks, usual))
    }

    fn ranks_where(&self, wanted: impl Fn(&Heartbeat) -> bool) -> Vec<usize> {
        let matching = self.heartbeats.iter().filter(|(_, beat)| wanted(beat));
        matching.map(|(rank, _)| *rank).collect()
    }

    fn each(
        &self,
        ranks: Vec<usize>,
        describe: impl Fn(usize) -> String,
    ) -> (Vec<usize>, Vec<String>) {
        let texts = ranks.iter().map(|rank| describe(*rank)).collect();
        (ranks, texts)
    }

    fn last_seen(&self, rank: usize) -> String {
        let last = self
            .heartbeats
            .get(&rank)
            .and_then(|beat| beat.recent.last());
        match last {
            Some(Started { number, what, .. }) => {
                format!("its last heartbeat reports {what} #{number}")
            }
            None => "its last heartbeat reports no collective".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    /// A collective and its tensors.
    type Call = (&'static str, &'static str);

    /// Returns the verdict of rank `judging` when each rank has started `calls[rank]` as its 4th collective.
    fn verdict(judging: usize, begun: &[Call]) -> Failure {
        let names: Vec<String> = (0..begun.len())
            .map(|rank| format!("rank {rank}"))
            .collect();
        let beat = |(what, tensors): &Call| Heartbeat {
            count: 9,
            started: 4,
            recent: vec![Started {
                number: 4,
                what: (*what).to_owned(),
                tensors: (*tensors).to_owned(),
            }],
            state: State::Running,
        };
        let others = begun
            .iter()
            .enumerate()
            .filter(|(rank, _)| *rank != judging);
        let evidence = Evidence {
            rank: judging,
            names: &names,
            heartbeats: &others.map(|(rank, begun)| (rank, beat(begun))).collect(),
            silent: &[],
            waited: 1.0,
        };
        evidence.verdict(&FailedCollective {
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
                "rank 1 called another collective: broadcast #4, while rank 0 called all_reduce #4",
            ),
            (
                &[send, reduce, reduce],
                &[0],
                "rank 0 called another collective: broadcast #4, while rank 1 called all_reduce #4",
            ),
            (
                &[reduce, send, reduce, send],
                &[1, 3],
                "rank 3 called another collective",
            ),
            (
                &[reduce, wide],
                &[1],
                "rank 1 passed other tensors to all_reduce #4: float [4], while rank 0 passed float [3]",
            ),
            (
                &[wide, reduce, reduce],
                &[0],
                "rank 0 passed other tensors to all_reduce #4: float [4], while rank 1 passed float [3]",
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
