//! Slurm's burst buffers with BAFS volumes, on a real slurmctld with `burst_buffer/lua`.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bafs_tests::batch_systems::{
    SlurmCluster, SlurmOptions, has_burst_buffer_plugin, slurm_obstacle, wait_until,
};
use bafs_tests::{TestCluster, bafs_program, mount_obstacle, report_skip};
use tempfile::TempDir;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Longest time that a submission may take with the hooks that slurmctld runs itself: each has
/// 50 ms, and a submission without them takes 20 ms.
const SUBMISSION_MAX: Duration = Duration::from_millis(500);

/// BAFS, and a Slurm whose burst buffer it is.
struct BurstBufferBench {
    slurm: SlurmCluster,
    cluster: TestCluster,
    own: TempDir,
}

impl BurstBufferBench {
    fn start(test: &str, settings: &str) -> Result<Option<Self>> {
        let missing = || (!has_burst_buffer_plugin()).then(|| "no burst_buffer/lua".to_owned());
        if let Some(reason) = slurm_obstacle()
            .or_else(missing)
            .or_else(root_obstacle)
            .or_else(mount_obstacle)
        {
            report_skip(test, &reason);
            return Ok(None);
        }
        let cluster = TestCluster::start(&["200MB"])?;
        let own = tempfile::tempdir()?;
        // Slurm gives root no burst buffer: another user submits, writes and mounts here.
        for name in ["", "user", "mounts"] {
            let path = own.path().join(name);
            fs::create_dir_all(&path)?;
            fs::set_permissions(&path, Permissions::from_mode(0o777))?;
        }
        let path = |name: &str| own.path().join(name);
        let conf = format!(
            "program={}\nidentity={}\ncatalog={}\nstate={}\nmounts={}\npool_bytes=200000000\n",
            bafs_program().display(),
            cluster.cluster.identity().display(),
            cluster.cluster.catalog_address(),
            path("state").display(),
            path("mounts").display()
        );
        fs::write(path("conf"), conf)?;
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../integrations/slurm");
        let scripts = scripts.canonicalize()?;
        // Slurm gives its Prolog none of slurmd's own variables.
        let script = |name: &str| -> Result<String> {
            let (conf, inner) = (path("conf"), scripts.join(name));
            let text = format!(
                "#!/bin/sh\nexport BAFS_BURST_BUFFER_CONF='{}'\nexec '{}'\n",
                conf.display(),
                inner.display()
            );
            fs::write(path(name), text)?;
            fs::set_permissions(path(name), Permissions::from_mode(0o755))?;
            Ok(path(name).display().to_string())
        };
        let options = SlurmOptions {
            nodes: 1,
            burst_buffer: Some((scripts.join("burst_buffer.lua"), settings.to_owned())),
            more_settings: format!(
                "Prolog={}\nEpilog={}\n",
                script("prolog.sh")?,
                script("epilog.sh")?
            ),
            has_shared_fuse: true,
            environment: vec![("BAFS_BURST_BUFFER_CONF", path("conf").display().to_string())],
        };
        Ok(Some(Self {
            slurm: SlurmCluster::start(&options)?,
            cluster,
            own,
        }))
    }

    fn submit(&self, script: &str) -> Result<std::process::Output> {
        let place = self.own.path().join("user");
        let file = place.join("job.sh");
        fs::write(&file, script)?;
        let mut sbatch = self.slurm.command("setpriv");
        sbatch.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sbatch"]);
        sbatch.args(["--parsable", "--output=job.log"]).arg(file);
        Ok(sbatch
            .current_dir(place)
            .env("HOME", "/nonexistent")
            .output()?)
    }

    fn submit_accepted(&self, script: &str) -> Result<String> {
        let output = self.submit(script)?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    }

    fn home(&self, name: &str) -> PathBuf {
        self.cluster.home.path().join(name)
    }

    fn run_slurm(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let output = self.slurm.command(program).args(arguments).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn wait_for_file(&self, path: &Path) -> Result<String> {
        wait_until(TIMEOUT, || Ok(path.exists())).with_context(|| {
            let log = fs::read_to_string(self.own.path().join("user/job.log")).unwrap_or_default();
            let queue = self
                .run_slurm("scontrol", &["show", "job"])
                .unwrap_or_default();
            format!("{}: {log} {queue}", path.display())
        })?;
        Ok(fs::read_to_string(path)?)
    }

    fn count_volumes(&self) -> Result<usize> {
        let volumes = self
            .cluster
            .bafs_command(&["--json", "volume", "list"])
            .output()?;
        let volumes: serde_json::Value = serde_json::from_slice(&volumes.stdout)?;
        let list = volumes.as_array().or_else(|| volumes["volumes"].as_array());
        Ok(list.context("a list of volumes")?.len())
    }

    /// Neither a volume nor a mount nor state of a job is left.
    fn check_nothing_left(&self) -> Result<()> {
        wait_until(TIMEOUT, || Ok(self.count_volumes()? == 0)).context("volumes are deleted")?;
        let is_empty = |name| bafs_tests::is_gone_or_empty(&self.own.path().join(name));
        wait_until(TIMEOUT, || Ok(is_empty("state") && is_empty("mounts"))).context("no state")
    }
}

fn root_obstacle() -> Option<String> {
    let is_root = nix::unistd::geteuid().is_root();
    (!is_root).then(|| "only root submits as another user".to_owned())
}

const SCRIPT: &str = "#!/bin/sh\n#BB_LUA pool=bafs capacity=20MB\n\
     #BAFS jobdw name=work size=9.5MB\n#BAFS jobdw name=data size=8MiB\n\
     #BAFS copy_in volume=data source=bafs://home/input\n\
     #BAFS copy_out volume=work path=result target=bafs://home/results/first\n\
     sort \"$BAFS_data/numbers\" > \"$BAFS_work/result\"\n";

#[test]
fn cluster_burst_buffer_stages_in_and_out() -> Result<()> {
    let test = "cluster_burst_buffer_stages_in_and_out";
    let Some(bench) = BurstBufferBench::start(test, "")? else {
        return Ok(());
    };
    fs::create_dir(bench.home("input"))?;
    fs::write(bench.home("input/numbers"), "3\n1\n2\n")?;
    bench.submit_accepted(SCRIPT)?;
    let result = bench.wait_for_file(&bench.home("results/first"))?;
    ensure!(result == "1\n2\n3\n", "{result}");
    bench.check_nothing_left()
}

/// Home refuses the result for longer than Slurm waits; then it takes it.
#[test]
fn cluster_stage_out_outlives_its_timeout() -> Result<()> {
    let test = "cluster_stage_out_outlives_its_timeout";
    let Some(bench) = BurstBufferBench::start(test, "StageOutTimeout=5\n")? else {
        return Ok(());
    };
    fs::create_dir(bench.home("input"))?;
    fs::write(bench.home("input/numbers"), "3\n1\n2\n")?;
    // A file is where the directory of the results has to be.
    fs::write(bench.home("results"), "in the way")?;
    let job = bench.submit_accepted(SCRIPT)?;
    let torn_down = bench.own.path().join(format!("state/{job}/torn_down"));
    bench
        .wait_for_file(&torn_down)
        .context("Slurm gives the job up")?;
    ensure!(bench.count_volumes()? == 2, "the volumes stay");
    let shown = bench.run_slurm("scontrol", &["show", "bbstat"])?;
    ensure!(
        shown.contains(&format!("job {job}: 0 of 1 results sent")),
        "{shown}"
    );
    fs::remove_file(bench.home("results"))?;
    let result = bench.wait_for_file(&bench.home("results/first"))?;
    ensure!(result == "1\n2\n3\n", "{result}");
    bench.check_nothing_left()
}

#[test]
fn cluster_wrong_directives_are_rejected_at_once() -> Result<()> {
    let test = "cluster_wrong_directives_are_rejected_at_once";
    let Some(bench) = BurstBufferBench::start(test, "")? else {
        return Ok(());
    };
    let rejected = [
        (
            "#BB_LUA pool=bafs capacity=3.5MB\n",
            "write it without a point",
        ),
        (
            "#BB_LUA pool=bafs capacity=1MB\n#BAFS jobdw name=a size=1MiB\n",
            "need 1048576 bytes",
        ),
        (
            "#BB_LUA pool=bafs capacity=1MB\n#BAFS jobdw name=a size=1XB\n",
            "is no size",
        ),
        (
            "#BB_LUA pool=bafs capacity=1MB\n#BAFS jobwd name=a\n",
            "unknown directive jobwd",
        ),
        (
            "#BB_LUA pool=bafs capacity=1MB\n#BAFS copy_in volume=b source=bafs://home/x\n",
            "unknown volume b",
        ),
    ];
    for (lines, expected) in rejected {
        let output = bench.submit(&format!("#!/bin/sh\n{lines}true\n"))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success(), "{lines} is accepted");
        ensure!(said.contains(expected), "{lines}: {said}");
    }
    // Whatever the cluster does, these hooks do not ask it.
    let best = (0..5)
        .map(|_| time_submission(&bench))
        .collect::<Result<Vec<_>>>()?;
    let best = best.into_iter().min().unwrap_or_default();
    ensure!(best < SUBMISSION_MAX, "a submission takes {best:?}");
    let jobs = bench.run_slurm("squeue", &["-h"])?;
    ensure!(jobs.lines().count() == 5, "{jobs}");
    Ok(())
}

#[expect(
    clippy::disallowed_methods,
    reason = "the time of a command is measured"
)]
fn time_submission(bench: &BurstBufferBench) -> Result<Duration> {
    let began = Instant::now();
    bench.submit_accepted("#!/bin/sh\n#SBATCH --hold\n#BB_LUA pool=bafs capacity=1MB\ntrue\n")?;
    Ok(began.elapsed())
}
