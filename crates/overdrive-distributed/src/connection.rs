//! The rendezvous of the processes of a group: opening the store, joining, connecting.

use std::time::Duration;

use overdrive_sys::c10d::{Group, NetworkDevice, Store, StoreRole};

use crate::{Backend, Error, GroupConfig, Rendezvous, Result};

/// Opens the store if this rank hosts it, else connects to it.
pub(crate) fn open_store(
    rendezvous: &Rendezvous,
    hosts_store: bool,
    timeout: Duration,
) -> Result<Store> {
    let (action, remedy, role) = if hosts_store {
        (
            "open",
            "choose a port that is free on this machine (MASTER_PORT)",
            // The store has no authentication. It listens on the network only if ranks on other machines need it.
            match rendezvous.is_loopback() {
                true => StoreRole::LocalServer,
                false => StoreRole::Server,
            },
        )
    } else if rendezvous.launcher_hosts_store {
        (
            "reach",
            "the launcher hosts it: check that the launcher is running",
            StoreRole::Client,
        )
    } else {
        (
            "reach",
            "rank 0 hosts it: check that rank 0 was started, and that MASTER_ADDR and MASTER_PORT are \
             the same for all processes",
            StoreRole::Client,
        )
    };
    match Store::tcp(
        &rendezvous.master_addr,
        rendezvous.master_port,
        role,
        timeout,
    ) {
        Ok((store, _)) => Ok(store),
        Err(source) => Err(Error::Store {
            rank: rendezvous.rank,
            action,
            address: format!("{}:{}", rendezvous.master_addr, rendezvous.master_port),
            timeout,
            remedy,
            source: Box::new(source),
        }),
    }
}

/// Blocks until every rank has joined exactly once, all with the same world size.
pub(crate) fn wait_for_all_ranks(
    store: &Store,
    rendezvous: &Rendezvous,
    timeout: Duration,
) -> Result<()> {
    let (rank, world_size) = (rendezvous.rank, rendezvous.world_size);
    let process = format!("{} process {}", host(), std::process::id());
    let disagreement = |problem: String| Error::Disagreement {
        rank,
        process: process.clone(),
        problem,
    };
    let own = format!("join/{rank}");
    // Compare-and-set: of two processes with the same rank, the second one reads the name of the first.
    let first = store.compare_set(&own, b"", process.as_bytes())?;
    if first != process.as_bytes() {
        let other = String::from_utf8_lossy(&first);
        return Err(disagreement(format!(
            "has the same rank as {other}; every process needs its own RANK"
        )));
    }
    let size = world_size.to_string();
    let agreed = store.compare_set("size", b"", size.as_bytes())?;
    if agreed != size.as_bytes() {
        let other = String::from_utf8_lossy(&agreed);
        return Err(disagreement(format!(
            "expects {world_size} processes, but others expect {other}; WORLD_SIZE must be the same for all"
        )));
    }
    let keys: Vec<String> = (0..world_size).map(|rank| format!("join/{rank}")).collect();
    let Err(error) = store.wait(&keys, timeout) else {
        return Ok(());
    };
    // The timeout does not tell which ranks are missing; their keys do.
    let mut missing = Vec::new();
    for (rank, key) in keys.iter().enumerate() {
        match store.check(&[key]) {
            Ok(true) => {}
            Ok(false) => missing.push(format!("rank {rank}")),
            Err(_) => return Err(error.into()),
        }
    }
    if missing.is_empty() {
        return Ok(()); // the last ones joined as the time ran out
    }
    Err(Error::Incomplete {
        rank,
        world_size,
        missing: missing.join(", "),
        timeout,
    })
}

/// Connects the ranks with each other over the configured backend.
pub(crate) fn connect(
    store: &Store,
    rendezvous: &Rendezvous,
    config: &GroupConfig,
) -> Result<Group> {
    let (rank, world_size) = (rendezvous.rank, rendezvous.world_size);
    let group = match config.backend {
        Backend::Nccl => {
            let device = rendezvous.local_rank;
            Group::nccl(store, rank, world_size, config.timeout, device)?
        }
        Backend::Gloo => {
            let variable = std::env::var("GLOO_SOCKET_IFNAME").ok();
            let named = config.interface.as_ref().or(variable.as_ref());
            let device = match named {
                Some(name) => NetworkDevice::Interface(name),
                // The host name may resolve to an address that a container or laptop does not listen on.
                None if rendezvous.is_loopback() => NetworkDevice::Address("127.0.0.1"),
                None => NetworkDevice::HostName,
            };
            Group::gloo(store, rank, world_size, config.timeout, device)?
        }
    };
    Ok(group)
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .or_else(|_| std::env::var("HOSTNAME"))
        .unwrap_or_else(|_| "this host".to_owned())
}
