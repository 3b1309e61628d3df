//! How the processes of a group find one another.

use std::time::Duration;

use overdrive_sys::c10d::{Group, NetworkDevice, Store, StoreRole};

use crate::{Backend, Error, GroupConfig, Rendezvous, Result};

pub(crate) fn open_store(place: &Rendezvous, keeps: bool, timeout: Duration) -> Result<Store> {
    let (what, way_out, role) = if keeps {
        (
            "open",
            "choose a port that is free on this machine (MASTER_PORT)",
            StoreRole::Server,
        )
    } else if place.launcher_keeps_store {
        (
            "reach",
            "the launcher keeps it: see whether it runs",
            StoreRole::Client,
        )
    } else {
        (
            "reach",
            "rank 0 keeps it: see whether it was started, and whether MASTER_ADDR and MASTER_PORT are \
             the same for all",
            StoreRole::Client,
        )
    };
    match Store::tcp(&place.master_addr, place.master_port, role, timeout) {
        Ok((store, _)) => Ok(store),
        Err(source) => Err(Error::Store {
            rank: place.rank,
            what,
            address: format!("{}:{}", place.master_addr, place.master_port),
            timeout,
            way_out,
            source: Box::new(source),
        }),
    }
}

/// Waits until every rank is there, once, with the same size in mind.
pub(crate) fn meet(store: &Store, place: &Rendezvous, timeout: Duration) -> Result<()> {
    let (rank, world_size) = (place.rank, place.world_size);
    let here = format!("{} process {}", host(), std::process::id());
    let disagreement = |problem: String| Error::Disagreement {
        rank,
        here: here.clone(),
        problem,
    };
    let own = format!("join/{rank}");
    let first = store.compare_set(&own, b"", here.as_bytes())?;
    if first != here.as_bytes() {
        let other = String::from_utf8_lossy(&first);
        return Err(disagreement(format!(
            "is not the only one: {other} has the same rank; every process needs a RANK of its own"
        )));
    }
    let size = world_size.to_string();
    let agreed = store.compare_set("size", b"", size.as_bytes())?;
    if agreed != size.as_bytes() {
        let other = String::from_utf8_lossy(&agreed);
        return Err(disagreement(format!(
            "expects {world_size} processes, others expect {other}; WORLD_SIZE is the same for all"
        )));
    }
    let keys: Vec<String> = (0..world_size).map(|rank| format!("join/{rank}")).collect();
    let Err(error) = store.wait(&keys, timeout) else {
        return Ok(());
    };
    let mut missing = Vec::new();
    for (rank, key) in keys.iter().enumerate() {
        match store.check(&[key]) {
            Ok(true) => {}
            Ok(false) => missing.push(format!("rank {rank}")),
            Err(_) => return Err(error.into()),
        }
    }
    if missing.is_empty() {
        return Ok(()); // they came as the time ran out
    }
    Err(Error::Incomplete {
        rank,
        world_size,
        missing: missing.join(", "),
        timeout,
    })
}

pub(crate) fn connect(store: &Store, place: &Rendezvous, config: &GroupConfig) -> Result<Group> {
    let (rank, world_size) = (place.rank, place.world_size);
    let group = match config.backend {
        Backend::Nccl => Group::nccl(store, rank, world_size, config.timeout, place.local_rank)?,
        Backend::Gloo => {
            let variable = std::env::var("GLOO_SOCKET_IFNAME").ok();
            let named = config.interface.as_ref().or(variable.as_ref());
            let device = match named {
                Some(name) => NetworkDevice::Interface(name),
                None if place.is_loopback() => NetworkDevice::Address("127.0.0.1"),
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
        .unwrap_or_else(|_| "this machine's".to_owned())
}
