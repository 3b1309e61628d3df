//! The variables of launchers, and the errors about invalid ones.

use overdrive_distributed::{GroupConfig, Launcher, ProcessGroup, Rendezvous};

fn read(variables: &[(&str, &str)]) -> Result<Rendezvous, String> {
    let lookup = |name: &str| {
        let found = variables.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    Rendezvous::from_variables(lookup).map_err(|error| error.to_string())
}

#[test]
fn without_variables_it_is_a_world_of_one() {
    assert_eq!(read(&[]).unwrap(), Rendezvous::default());
    assert_eq!(read(&[("WORLD_SIZE", "1")]).unwrap(), Rendezvous::default());
    assert_eq!(
        read(&[("RANK", ""), ("WORLD_SIZE", " ")]).unwrap(),
        Rendezvous::default()
    );
}

#[test]
fn torchruns_variables_are_read() {
    let rendezvous = read(&[
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("MASTER_ADDR", "node0.cluster"),
        ("MASTER_PORT", "12345"),
        ("TORCHELASTIC_RESTART_COUNT", "2"),
        ("TORCHELASTIC_RUN_ID", "job7"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        // mpirun may have started torchrun: torch's variables count.
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
    ])
    .unwrap();
    let expected = Rendezvous {
        rank: 5,
        world_size: 8,
        local_rank: 1,
        local_world_size: 4,
        master_addr: "node0.cluster".to_owned(),
        master_port: 12345,
        restart_count: 2,
        run_id: "job7".to_owned(),
        launcher_hosts_store: true,
        launcher: Launcher::Torch,
    };
    assert_eq!(rendezvous, expected);
}

#[test]
fn a_kubernetes_job_that_sets_no_local_rank_has_one_process_a_machine() {
    let rendezvous = read(&[
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("MASTER_ADDR", "job-0.svc"),
        ("MASTER_PORT", "29500"),
    ])
    .unwrap();
    assert_eq!((rendezvous.local_rank, rendezvous.local_world_size), (0, 1));
}

#[test]
fn open_mpis_hydras_and_slurms_variables_are_read() {
    let rendezvous = read(&[
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ])
    .unwrap();
    // All on one machine: the store is on it.
    assert_eq!(rendezvous.launcher, Launcher::OpenMpi);
    assert_eq!(
        (
            rendezvous.rank,
            rendezvous.world_size,
            rendezvous.local_rank
        ),
        (1, 2, 1)
    );
    assert_eq!(
        (rendezvous.master_addr.as_str(), rendezvous.master_port),
        ("127.0.0.1", 29500)
    );

    let rendezvous = read(&[
        ("PMI_RANK", "3"),
        ("PMI_SIZE", "4"),
        ("MPI_LOCALRANKID", "1"),
        ("MPI_LOCALNRANKS", "2"),
        ("MASTER_ADDR", "10.0.0.1"),
    ])
    .unwrap();
    assert_eq!(rendezvous.launcher, Launcher::Pmi);
    assert_eq!(
        (
            rendezvous.rank,
            rendezvous.local_rank,
            rendezvous.master_addr.as_str()
        ),
        (3, 1, "10.0.0.1")
    );

    let slurm = [
        ("SLURM_PROCID", "2"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NTASKS_PER_NODE", "2(x2)"),
        ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7"),
        ("SLURM_STEP_ID", "0"),
    ];
    let rendezvous = read(&slurm).unwrap();
    assert_eq!(rendezvous.launcher, Launcher::Slurm);
    assert_eq!(
        (
            rendezvous.rank,
            rendezvous.local_world_size,
            rendezvous.master_addr.as_str()
        ),
        (2, 2, "10.0.0.7")
    );
    // A script that sbatch runs has the variables too, and is one process.
    assert_eq!(read(&slurm[..5]).unwrap().world_size, 1);
}

#[test]
fn each_missing_variable_is_named_with_the_remedy() {
    let error = read(&[("RANK", "0")]).unwrap_err();
    assert!(
        error.starts_with("WORLD_SIZE is not set, but RANK is; start all"),
        "{error}"
    );
    let error = read(&[("WORLD_SIZE", "2")]).unwrap_err();
    assert!(
        error.starts_with("RANK is not set, but WORLD_SIZE is"),
        "{error}"
    );
    let error = read(&[("RANK", "0"), ("WORLD_SIZE", "2")]).unwrap_err();
    assert!(
        error.starts_with("MASTER_ADDR is not set, but WORLD_SIZE=2"),
        "{error}"
    );
    let error = read(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")]).unwrap_err();
    assert!(
        error.starts_with("MASTER_PORT is not set, but WORLD_SIZE=2"),
        "{error}"
    );
}

#[test]
fn each_wrong_or_contradictory_variable_is_named_with_its_value() {
    let with = |changes: &[(&'static str, &'static str)]| {
        let mut all = changes.to_vec();
        all.extend([
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "1"),
        ]);
        read(&all).unwrap_err()
    };
    assert!(with(&[("RANK", "one")]).contains("`RANK` is one; it must be a whole number"));
    assert!(with(&[("WORLD_SIZE", "-2")]).contains("`WORLD_SIZE` is -2;"));
    assert!(
        with(&[("MASTER_PORT", "70000")]).contains("`MASTER_PORT` is 70000; it must be a port")
    );
    assert!(with(&[("MASTER_PORT", "0")]).contains("`MASTER_PORT` is 0;"));
    assert!(with(&[("RANK", "2")]).contains("RANK=2 and WORLD_SIZE=2: ranks start at 0"));
    let error = with(&[("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")]);
    assert!(
        error.contains("LOCAL_RANK=2, LOCAL_WORLD_SIZE=2 and WORLD_SIZE=2"),
        "{error}"
    );
    assert!(with(&[("LOCAL_WORLD_SIZE", "4")]).contains("LOCAL_WORLD_SIZE=4"));
    assert!(with(&[("TORCHELASTIC_USE_AGENT_STORE", "perhaps")]).contains("True or False"));
}

#[test]
fn a_world_that_no_list_holds_is_refused_before_anything_is_opened() {
    let rendezvous = Rendezvous {
        world_size: 1 << 62,
        ..Rendezvous::default()
    };
    let error = ProcessGroup::new(rendezvous, GroupConfig::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`world size` is 4611686018427387904; it must be at most 1048576"
    );
}
