//! Groups of some of the ranks.

use std::sync::atomic::Ordering;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::group::Meeting;
use crate::monitor::Keeper;
use crate::{Error, ProcessGroup, Rendezvous, Result};

impl ProcessGroup {
    /// Makes a group of some of this group's ranks (`torch.distributed.new_group`). **All** ranks of this
    /// group call it, with the same list; those that are not in the list get `None`. Ranks count from 0 in
    /// the new group, in the order of their numbers here; messages name both numbers.
    ///
    /// It has its own connections and its own watch, and the options of this group.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a list that is empty, names a rank twice or one that there is not, or
    /// is not the same on all ranks; else as [`new`](Self::new).
    ///
    /// ```
    /// let group = overdrive_distributed::ProcessGroup::single();
    /// let part = group.new_group(&[0])?.expect("this process is rank 0");
    /// assert_eq!((part.rank(), part.world_size()), (0, 1));
    /// # Ok::<(), overdrive_distributed::Error>(())
    /// ```
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Self>> {
        let mut members = ranks.to_vec();
        members.sort_unstable();
        let lists = self.all_gather_object(&members)?;
        let problem = |value: String, expected: String| Error::InvalidArgument {
            argument: "ranks",
            value,
            expected,
        };
        // Every rank sees every list, so all of them end with the same error.
        if let Some(other) = lists.iter().position(|list| *list != lists[0]) {
            return Err(problem(
                format!("{:?} on rank {other}", lists[other]),
                format!("the same ranks everywhere: {:?} on rank 0", lists[0]),
            ));
        }
        let twice = members.windows(2).any(|pair| pair[0] == pair[1]);
        let beyond = members.iter().any(|rank| *rank >= self.world_size());
        if members.is_empty() || twice || beyond {
            let expected = format!(
                "one or more ranks, each less than {} and once",
                self.world_size()
            );
            return Err(problem(format!("{members:?}"), expected));
        }
        let number = self.next_part();
        if !members.contains(&self.rank()) {
            return Ok(None);
        }
        self.part(members, &format!("part{number}")).map(Some)
    }

    /// Splits this group into parts: those ranks that give the same `color` are one. **All** ranks of this
    /// group call it (`MPI_Comm_split`; `torch.distributed.new_subgroups`). The host's name as a color gives
    /// a group for each machine.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn split<C: Serialize + DeserializeOwned + PartialEq>(&self, color: &C) -> Result<Self> {
        let colors = self.all_gather_object(color)?;
        let own = &colors[self.rank()];
        let members: Vec<usize> = (0..colors.len())
            .filter(|rank| colors[*rank] == *own)
            .collect();
        let number = self.next_part();
        let name = format!("part{number}/{}", members[0]);
        self.part(members, &name)
    }

    /// The same on all ranks, which make parts in the same order.
    fn next_part(&self) -> u64 {
        self.shared.parts.fetch_add(1, Ordering::SeqCst)
    }

    fn part(&self, members: Vec<usize>, name: &str) -> Result<Self> {
        let global = |rank: &usize| self.shared.global_ranks[*rank];
        let global_ranks: Vec<usize> = members.iter().map(global).collect();
        let place = |rank: usize| members.iter().position(|member| *member == rank);
        let rendezvous = Rendezvous {
            rank: place(self.rank()).unwrap_or(0),
            world_size: members.len(),
            ..self.shared.rendezvous.clone()
        };
        let config = self.shared.config.clone();
        let connected = match &self.shared.connected {
            Some(connected) if members.len() > 1 => connected,
            _ => return Ok(Self::alone(rendezvous, config, global_ranks)),
        };
        let meeting = Meeting {
            store: connected.store.prefixed(name)?,
            root: None,
            keeper: Keeper {
                rank: connected.keeper.rank.and_then(place),
                ..connected.keeper.clone()
            },
            global_ranks,
            whole: Some(self.clone()),
        };
        Self::join(rendezvous, config, meeting)
    }
}
