//! Groups of a subset of the ranks.

use std::sync::atomic::Ordering;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::group::Membership;
use crate::monitor::StoreHost;
use crate::{ProcessGroup, Rendezvous, Result};

impl ProcessGroup {
    /// Creates a group of some of this group's ranks (`torch.distributed.new_group`). **All** ranks of this
    /// group call it, with the same list; ranks that are not in the list get `None`. Ranks of the new group
    /// start at 0 and keep the order of this group; messages name both ranks.
    ///
    /// The new group has its own connections and monitor, and the options of this group.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`] for a list that is empty, that names a rank twice or one that
    /// does not exist, or that differs between the ranks; else as [`new`](Self::new).
    /// ```
    /// let group = overdrive_distributed::ProcessGroup::single();
    /// let subgroup = group.new_group(&[0])?.expect("this process is rank 0");
    /// assert_eq!((subgroup.rank(), subgroup.world_size()), (0, 1));
    /// # Ok::<(), overdrive_distributed::Error>(())
    /// ```
    pub fn new_group(&self, ranks: &[usize]) -> Result<Option<Self>> {
        // Sorted, so that the ranks of the new group do not depend on the order of the list.
        let mut members = ranks.to_vec();
        members.sort_unstable();
        let lists = self.all_gather_object(&members)?;
        let invalid = |value: String, expected: String| {
            overdrive_core::Error::option("ranks", value, expected)
        };
        // Every rank sees every list, so all of them return the same error.
        if let Some(other) = lists.iter().position(|list| *list != lists[0]) {
            return Err(invalid(
                format!("{:?} on rank {other}", lists[other]),
                format!("the same on all ranks; it is {:?} on rank 0", lists[0]),
            )
            .into());
        }
        let twice = members.windows(2).any(|pair| pair[0] == pair[1]);
        let beyond = members.iter().any(|rank| *rank >= self.world_size());
        if members.is_empty() || twice || beyond {
            let expected = format!(
                "a list of at least one rank, each below {} and listed once",
                self.world_size()
            );
            return Err(invalid(format!("{members:?}"), expected).into());
        }
        let number = self.next_subgroup();
        if !members.contains(&self.rank()) {
            return Ok(None);
        }
        self.subgroup(members, &format!("subgroup{number}"))
            .map(Some)
    }

    /// Splits this group: ranks with the same `color` form one new group. **All** ranks of this group call
    /// it (`MPI_Comm_split`; `torch.distributed.new_subgroups`). With the host name as the color there is one
    /// group per machine.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn split<C: Serialize + DeserializeOwned + PartialEq>(&self, color: &C) -> Result<Self> {
        let colors = self.all_gather_object(color)?;
        let own = &colors[self.rank()];
        let members: Vec<usize> = (0..colors.len())
            .filter(|rank| colors[*rank] == *own)
            .collect();
        let number = self.next_subgroup();
        let name = format!("subgroup{number}/{}", members[0]);
        self.subgroup(members, &name)
    }

    /// Returns the number of the next subgroup.
    fn next_subgroup(&self) -> u64 {
        // The same on all ranks, because they create subgroups in the same order.
        self.shared.subgroups.fetch_add(1, Ordering::SeqCst)
    }

    fn subgroup(&self, members: Vec<usize>, name: &str) -> Result<Self> {
        let global = |rank: &usize| self.shared.global_ranks[*rank];
        let global_ranks: Vec<usize> = members.iter().map(global).collect();
        let new_rank = |rank: usize| members.iter().position(|member| *member == rank);
        let rendezvous = Rendezvous {
            rank: new_rank(self.rank()).unwrap_or(0),
            world_size: members.len(),
            ..self.shared.rendezvous.clone()
        };
        let config = self.shared.config.clone();
        let connected = match &self.shared.connected {
            Some(connected) if members.len() > 1 => connected,
            _ => return Ok(Self::alone(rendezvous, config, global_ranks)),
        };
        let membership = Membership {
            store: connected.store.prefixed(name)?,
            root: None,
            store_host: StoreHost {
                rank: connected.store_host.rank.and_then(new_rank),
                ..connected.store_host.clone()
            },
            global_ranks,
            parent: Some(self.clone()),
        };
        Self::join(rendezvous, config, membership)
    }
}
