//! Pilots of a temporary cluster whose run was killed: they end by themselves, and the next run
//! ends those that it finds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::batch_systems::wait_until;
use bafs_tests::{
    bafs_program, is_gone_or_empty, mount_obstacle, printed_text, processes_matching, report_skip,
};
use tempfile::TempDir;

const TIMEOUT: Duration = Duration::from_secs(60);

/// A user's home directory and a workflow of one job.
struct OrphanBench {
    home: TempDir,
}

impl OrphanBench {
    fn start(test: &str) -> Result<Option<Self>> {
        if let Some(reason) = mount_obstacle() {
            report_skip(test, &reason);
            return Ok(None);
        }
        let home = tempfile::tempdir()?;
        let bench = Self { home };
        bench.write_workflow(60)?;
        Ok(Some(bench))
    }

    fn write_workflow(&self, seconds: u32) -> Result<()> {
        let text = format!(
            "volume v scratch 1 MB\njob j {{\nexecutable = /bin/sh\n\
             arguments = -c \"sleep {seconds}; echo done > /v/out\"\n}}\n\
             mount v j /v\nextract v out bafs://home/out\n"
        );
        Ok(fs::write(self.home.path().join("w.bafs"), text)?)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(bafs_program());
        command
            .args(arguments)
            .env("HOME", self.home.path())
            .env("TMPDIR", self.home.path())
            .env_remove("XDG_STATE_HOME")
            .stdin(Stdio::null())
            .current_dir(self.home.path());
        command
    }

    fn pools(&self) -> PathBuf {
        self.home.path().join(".local/state/bafs/pools")
    }

    /// The directory of the only pool.
    fn pool(&self) -> Result<PathBuf> {
        let mut pools = fs::read_dir(self.pools())?;
        Ok(pools.next().context("a pool")??.path())
    }

    /// Starts a run and kills it when its pilot has a store.
    fn kill_run(&self) -> Result<()> {
        let arguments = ["run", "w.bafs", "--pool", "local:1", "--node-size", "20 MB"];
        let mut command = self.command(&arguments);
        let log = fs::File::create(self.home.path().join("run.log"))?;
        let mut run = command.stdout(Stdio::null()).stderr(log).spawn()?;
        let has_pilot = wait_until(TIMEOUT, || Ok(self.has_store()));
        run.kill()?;
        run.wait()?;
        has_pilot.context("the pilot joins")
    }

    fn has_store(&self) -> bool {
        let entries = fs::read_dir(self.home.path())
            .into_iter()
            .flatten()
            .flatten();
        let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.any(|name| name.starts_with("bafs-run-"))
    }

    /// Processes of pilots.
    fn pilots(&self) -> Vec<String> {
        let all = processes_matching(&self.pools().display().to_string());
        all.into_iter().filter(|it| it.contains("pilot")).collect()
    }
}

/// Ends with the test.
struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn cluster_next_run_ends_orphaned_pilots() -> Result<()> {
    let Some(bench) = OrphanBench::start("cluster_next_run_ends_orphaned_pilots")? else {
        return Ok(());
    };
    bench.kill_run()?;
    ensure!(!bench.pilots().is_empty(), "the pilot outlives its run");
    bench.write_workflow(0)?;
    let arguments = ["run", "w.bafs", "--pool", "local:1", "--node-size", "20 MB"];
    let output = bench.command(&arguments).output()?;
    let told = printed_text(&output);
    ensure!(output.status.success(), "{told}");
    ensure!(told.contains("ended the pilots of a killed run"), "{told}");
    ensure!(fs::read(bench.home.path().join("out"))? == b"done\n");
    wait_until(TIMEOUT, || Ok(bench.pilots().is_empty()))
        .with_context(|| format!("{:?}", bench.pilots()))?;
    ensure!(is_gone_or_empty(&bench.pools()), "a pool is left");
    Ok(())
}

#[test]
fn cluster_orphaned_pilot_ends_without_its_catalog() -> Result<()> {
    let Some(bench) = OrphanBench::start("cluster_orphaned_pilot_ends_without_its_catalog")? else {
        return Ok(());
    };
    bench.kill_run()?;
    let pool = bench.pool()?;
    // As a pilot that the batch system starts when the run is dead, with less patience.
    shorten_timeout(&pool.join("pool.json"))?;
    let name = format!("bafs-{}-9", pool.file_name().context("a name")?.display());
    let directory = pool.display().to_string();
    let mut command = bench.command(&["pool", "pilot", &directory, &name]);
    let mut pilot = ChildGuard(
        command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?,
    );
    wait_until(TIMEOUT, || Ok(pilot.0.try_wait()?.is_some())).context("the pilot ends")?;
    let removed = bench
        .command(&["pool", "remove", &pool_name(&pool)?])
        .output()?;
    ensure!(removed.status.success(), printed_text(&removed));
    wait_until(TIMEOUT, || Ok(bench.pilots().is_empty()))
}

fn pool_name(pool: &Path) -> Result<String> {
    let name = pool.file_name().context("a name")?;
    Ok(name.to_string_lossy().into_owned())
}

/// Checks that pilots end without their catalog, and has new ones wait for a second.
fn shorten_timeout(file: &Path) -> Result<()> {
    let mut pool: serde_json::Value = serde_json::from_slice(&fs::read(file)?)?;
    let timeout_s = pool["catalog_timeout_s"].as_u64().context("a timeout")?;
    ensure!((30..=600).contains(&timeout_s), "{timeout_s}");
    pool["catalog_timeout_s"] = 1.into();
    Ok(fs::write(file, serde_json::to_vec(&pool)?)?)
}
