//! Runs on pilots of a real Slurm, and the pools that start them.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::batch_systems::{SlurmCluster, SlurmOptions, slurm_obstacle, wait_until};
use bafs_tests::{TestCluster, bafs_program, mount_obstacle, processes_matching, report_skip};
use tempfile::TempDir;

/// Squares numbers on the nodes and sends them home.
fn workflow(jobs: u32, seconds: u32) -> String {
    format!(
        "for i in 1..{jobs}\nvolume v$(i) scratch 1 MB\njob j$(i) {{\nexecutable = /bin/sh\n\
         arguments = -c \"sleep {seconds}; echo $$(($(i) * $(i))) > /w/out\"\n}}\n\
         mount v$(i) j$(i) /w\nextract v$(i) out bafs://home/out/$(i)\nend\n"
    )
}

/// A Slurm with a user's home directory and a workflow.
struct SlurmBench {
    slurm: SlurmCluster,
    home: TempDir,
}

impl SlurmBench {
    fn start(test: &str, nodes: usize) -> Result<Option<Self>> {
        if let Some(reason) = slurm_obstacle().or_else(mount_obstacle) {
            report_skip(test, &reason);
            return Ok(None);
        }
        let options = SlurmOptions {
            nodes,
            ..SlurmOptions::default()
        };
        Ok(Some(Self {
            slurm: SlurmCluster::start(&options)?,
            home: tempfile::tempdir()?,
        }))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(bafs_program());
        let (name, value) = self.slurm.environment();
        command
            .args(arguments)
            .env(name, value)
            .env("HOME", self.home.path())
            .env_remove("XDG_STATE_HOME")
            .current_dir(self.home.path());
        command
    }

    fn write_workflow(&self, text: &str) -> Result<()> {
        Ok(fs::write(self.home.path().join("squares.bafs"), text)?)
    }

    fn check_results(&self, output: &Output, jobs: u32) -> Result<()> {
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}: {said}", output.status);
        for job in 1..=jobs {
            let file = self.home.path().join(format!("out/{job}"));
            let text = fs::read_to_string(&file).with_context(|| format!("{file:?}: {said}"))?;
            ensure!(text == format!("{}\n", job * job), "{text}");
        }
        Ok(())
    }

    /// No pilot, process, store or pool is left.
    fn check_nothing_left(&self) -> Result<()> {
        wait_until(Duration::from_secs(20), || {
            let listed = self.slurm.command("squeue").arg("-h").output()?;
            Ok(listed.stdout.is_empty())
        })
        .context("the queue is empty")?;
        let home = self.home.path().display().to_string();
        wait_until(Duration::from_secs(10), || {
            Ok(processes_matching(&home).is_empty())
        })
        .with_context(|| format!("{:?}", processes_matching(&home)))?;
        let pools = self.home.path().join(".local/state/bafs/pools");
        ensure!(
            bafs_tests::is_gone_or_empty(&pools),
            "{} is left",
            pools.display()
        );
        Ok(())
    }
}

const RUN: [&str; 8] = [
    "run",
    "squares.bafs",
    "--pool",
    "slurm:2",
    "--node-size",
    "100 MB",
    "--pool-address",
    "127.0.0.1",
];

#[test]
fn cluster_run_completes_on_slurm_pilots() -> Result<()> {
    let Some(bench) = SlurmBench::start("cluster_run_completes_on_slurm_pilots", 2)? else {
        return Ok(());
    };
    bench.write_workflow(&workflow(6, 0))?;
    let options = [
        "--time-limit",
        "1h",
        "--",
        "--partition=main",
        "--exclusive",
    ];
    let output = bench.command(&[&RUN[..], &options].concat()).output()?;
    bench.check_results(&output, 6)?;
    bench.check_nothing_left()
}

#[test]
fn cluster_run_survives_cancelled_pilots() -> Result<()> {
    let Some(bench) = SlurmBench::start("cluster_run_survives_cancelled_pilots", 2)? else {
        return Ok(());
    };
    bench.write_workflow(&workflow(8, 2))?;
    let mut run = bench.command(&RUN);
    let errors = fs::File::create(bench.home.path().join("errors"))?;
    let mut running = run
        .stderr(errors)
        .stdout(std::process::Stdio::null())
        .spawn()?;
    let cancelled = wait_until(Duration::from_secs(60), || {
        let mut list = bench.slurm.command("squeue");
        let listed = list.args(["-h", "-t", "RUNNING", "-o", "%i"]).output()?;
        Ok(!listed.stdout.is_empty())
    })
    .and_then(|()| {
        // While its first jobs run.
        std::thread::sleep(Duration::from_secs(3));
        let mut list = bench.slurm.command("squeue");
        let listed = list.args(["-h", "-t", "RUNNING", "-o", "%i"]).output()?;
        let listed = String::from_utf8(listed.stdout)?;
        let first = listed.lines().next().context("a pilot runs")?;
        Ok(bench.slurm.command("scancel").arg(first).status()?)
    });
    let status = running.wait()?;
    let stderr = fs::read(bench.home.path().join("errors"))?;
    ensure!(cancelled?.success(), "scancel");
    let output = Output {
        status,
        stdout: Vec::new(),
        stderr,
    };
    bench.check_results(&output, 8)?;
    bench.check_nothing_left()
}

#[test]
fn cluster_wrong_partition_ends_the_run() -> Result<()> {
    let Some(bench) = SlurmBench::start("cluster_wrong_partition_ends_the_run", 1)? else {
        return Ok(());
    };
    bench.write_workflow(&workflow(1, 0))?;
    let dry = ["pool", "dry-run", "slurm:1", "--", "--partition=absent"];
    let output = bench.command(&dry).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        !output.status.success() && said.contains("artition"),
        "{said}"
    );
    let output = bench
        .command(&[&RUN[..], &["--", "--partition=absent"]].concat())
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success(), "{said}");
    ensure!(
        said.contains("no further pilots are submitted: the dry run failed"),
        "{said}"
    );
    bench.check_nothing_left()
}

#[test]
fn cluster_gets_nodes_of_a_pool() -> Result<()> {
    let Some(bench) = SlurmBench::start("cluster_gets_nodes_of_a_pool", 1)? else {
        return Ok(());
    };
    let cluster = TestCluster::start(&[])?;
    let identity = cluster.cluster.identity().display().to_string();
    let catalog = cluster.cluster.catalog_address().to_owned();
    let client = [
        "--identity",
        identity.as_str(),
        "--catalog",
        catalog.as_str(),
    ];
    let add = [
        &["pool", "add", "night", "slurm:1", "--node-size", "50 MB"][..],
        &client,
    ]
    .concat();
    let mut pool = bench.command(&add).spawn()?;
    let list_servers = || {
        let output = bench
            .command(&[&["servers"][..], &client].concat())
            .output()?;
        Ok::<String, anyhow::Error>(String::from_utf8(output.stdout)?)
    };
    let joined = wait_until(Duration::from_secs(40), || {
        Ok(list_servers()?.contains("bafs-night-1"))
    });
    let listed = bench.command(&["pool", "list"]).output()?;
    check_private_files(&bench.home.path().join(".local/state/bafs/pools/night"))?;
    let removed = bench.command(&["pool", "remove", "night"]).output()?;
    let ended = pool.wait()?;
    joined.context("the node joins")?;
    let listed = String::from_utf8(listed.stdout)?;
    ensure!(
        listed.contains("night (slurm:1)") && listed.contains("running"),
        "{listed}"
    );
    ensure!(
        removed.status.success() && ended.success(),
        "{removed:?} {ended}"
    );
    bench.check_nothing_left()
}

/// Only their owner reads the identity and the scripts of pilots.
fn check_private_files(directory: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mut open = vec![directory.to_owned()];
    while let Some(path) = open.pop() {
        let metadata = fs::metadata(&path)?;
        let is_log = path.extension().is_some_and(|extension| extension == "log");
        let mode = metadata.permissions().mode() & 0o077;
        ensure!(mode == 0 || is_log, "{} has mode {mode:o}", path.display());
        if metadata.is_dir() {
            for entry in fs::read_dir(path)? {
                open.push(entry?.path());
            }
        }
    }
    Ok(())
}
