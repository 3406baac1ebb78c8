//! Copies of volumes on clusters of real processes: a further one takes what changed, and until it
//! is complete the one before it is of use, whoever dies.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::content::Content;
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip};

/// Bytes that the first stage writes, and that the second one changes.
const FULL_BYTES: usize = 48 << 20;
const CHANGED_BYTES: usize = 16 << 20;

/// Three stages that write one volume one after the other. Its files have two names each, and would
/// not fit into a copy twice. Each says on the host that it began, and the second and third wait
/// for a word.
struct ReplicatedRun {
    world: TestCluster,
    scheduler: Option<Child>,
    workflow_path: PathBuf,
}

impl ReplicatedRun {
    fn start(name: &str) -> Result<Option<Self>> {
        if let Some(reason) = mount_obstacle() {
            report_skip(name, &reason);
            return Ok(None);
        }
        let world = TestCluster::start(&["400MB", "400MB"])?;
        world.wait_for_servers(3)?;
        world.write_home("whole/whole", Content::new(1, FULL_BYTES).bytes())?;
        world.write_home("changed/changed", Content::new(2, CHANGED_BYTES).bytes())?;
        let home = world.home.path().display().to_string();
        let job = |name: &str, script: &str| {
            format!(
                "job {name} {{\nexecutable = /bin/sh\narguments = -c \"echo {name} >> {home}/log; \
                 until test -e {home}/go-{name}; do sleep 0.05; done; {script}\"\n}}\n\
                 mount v {name} /v\nmount whole {name} /whole\nmount changed {name} /changed\n"
            )
        };
        let text = format!(
            "volume v scratch 60 MB files 4\nvolume whole cache bafs://home/whole 60 MB\n\
             volume changed cache bafs://home/changed 30 MB\n{}{}{}\
             parent a child b\nparent b child c\nextract v all bafs://home/out\n",
            job(
                "a",
                "cat /whole/whole > /v/all; mkdir /v/d; echo small > /v/d/small; \
                 ln /v/all /v/d/all; ln /v/d/small /v/also"
            ),
            job(
                "b",
                "dd if=/changed/changed of=/v/all bs=1M conv=notrunc; chmod 600 /v/d/small"
            ),
            job(
                "c",
                "find /v/d/small -perm 600 | grep -q small && cat /v/d/small >> /v/d/all && \
                 find /v -type f -links 2 | grep -c . | grep -q 4"
            ),
        );
        let path = world.write_workflow(&text)?;
        let mut stages = Self {
            world,
            scheduler: None,
            workflow_path: path,
        };
        stages.start_scheduler()?;
        stages.release_job("a")?;
        Ok(Some(stages))
    }

    /// Starts the scheduler.
    fn start_scheduler(&mut self) -> Result<()> {
        let path = self.workflow_path.to_string_lossy();
        let arguments = ["run", &path, "--json", "--checkpoint", "always"];
        let mut command = self.world.bafs_command(&arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        self.scheduler = Some(command.spawn().context("bafs run starts")?);
        Ok(())
    }

    fn release_job(&self, job: &str) -> Result<()> {
        self.world.write_home(&format!("go-{job}"), b"")
    }

    /// What `bafs why` says of the volume.
    fn explain_volume(&self) -> Result<String> {
        let journal = self.workflow_path.with_extension("bafs.journal");
        let output = self
            .world
            .bafs_command(&["why", &journal.to_string_lossy(), "v"])
            .output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Waits until so many copies are complete; gives what is said of the last.
    fn wait_for_copies(&mut self, count: usize) -> Result<String> {
        let mut told = String::new();
        for _ in 0..1_200 {
            told = self.explain_volume().unwrap_or_default();
            let complete = told.lines().filter(|l| l.contains("is complete on node"));
            let complete: Vec<&str> = complete.collect();
            if complete.len() == count {
                return Ok(complete[count - 1].to_owned());
            }
            let run = self.scheduler.as_mut().context("it runs")?;
            if run.try_wait()?.is_some() {
                let output = self
                    .scheduler
                    .take()
                    .context("it ran")?
                    .wait_with_output()?;
                anyhow::bail!("the run is over: {}", printed_text(&output));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        anyhow::bail!("{count} copies are not complete: {told}")
    }

    /// The nodes that have the volume and its copy, once the first copy is complete.
    fn copy_nodes(&mut self) -> Result<(&'static str, &'static str)> {
        let said = self.wait_for_copies(1)?;
        let is_on = |node: &str| said.contains(&format!("complete on node {node} "));
        match (is_on("n1"), is_on("n2")) {
            (true, false) => Ok(("n2", "n1")),
            (false, true) => Ok(("n1", "n2")),
            _ => anyhow::bail!("where is the copy? {said}"),
        }
    }

    /// Lets the second stage write, and waits until the copy of that is under way at a node.
    fn begin_second_copy(&self, target: &str) -> Result<()> {
        let making = store_path(&self.world, target).join("making");
        self.release_job("b")?;
        for _ in 0..60_000 {
            if !bafs_tests::is_gone_or_empty(&making) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        anyhow::bail!("no copy is made in {}", making.display())
    }

    /// Lets the run end; gives how often each stage began.
    fn finish(mut self) -> Result<[usize; 3]> {
        self.release_job("b")?;
        self.release_job("c")?;
        let run = self.scheduler.take().context("it runs")?;
        let output = run.wait_with_output()?;
        ensure!(output.status.success(), printed_text(&output));
        let mut expected = Content::new(1, FULL_BYTES).bytes().to_vec();
        expected[..CHANGED_BYTES].copy_from_slice(Content::new(2, CHANGED_BYTES).bytes());
        expected.extend(b"small\n");
        ensure!(
            self.world.read_home("out")? == expected,
            "the result is wrong"
        );
        let log = String::from_utf8(self.world.read_home("log")?)?;
        Ok(["a", "b", "c"].map(|job| log.lines().filter(|line| *line == job).count()))
    }
}

fn store_path(world: &TestCluster, node: &str) -> PathBuf {
    world.cluster.directory().join(node)
}

/// Bytes that crossed the network, by what is said of a copy.
fn parse_received_bytes(said: &str) -> Result<usize> {
    let before = said.split(" bytes crossed").next().unwrap_or_default();
    let number = before.rsplit(' ').next().unwrap_or_default();
    number.parse().with_context(|| said.to_owned())
}

fn check_bytes(said: &str, expected: usize) -> Result<()> {
    let bytes = parse_received_bytes(said)?;
    // A small file or two besides.
    ensure!(
        (expected..expected + (256 << 10)).contains(&bytes),
        "{bytes} bytes travelled instead of {expected}: {said}"
    );
    Ok(())
}

#[test]
fn cluster_sends_only_changes_in_further_copies() -> Result<()> {
    let name = "cluster_sends_only_changes_in_further_copies";
    let Some(mut stages) = ReplicatedRun::start(name)? else {
        return Ok(());
    };
    let (source, _) = stages.copy_nodes()?;
    check_bytes(&stages.wait_for_copies(1)?, FULL_BYTES)?;
    stages.release_job("b")?;
    check_bytes(&stages.wait_for_copies(2)?, CHANGED_BYTES)?;
    // What is complete takes the place of the volume, with what both stages did.
    stages.world.cluster.kill(source)?;
    let began = stages.finish()?;
    ensure!(began[..2] == [1, 1], "stages ran again: {began:?}");
    Ok(())
}

#[test]
fn cluster_resumes_from_older_copy_when_source_dies() -> Result<()> {
    let name = "cluster_resumes_from_older_copy_when_source_dies";
    let Some(mut stages) = ReplicatedRun::start(name)? else {
        return Ok(());
    };
    let (source, target) = stages.copy_nodes()?;
    stages.begin_second_copy(target)?;
    stages.world.cluster.kill(source)?;
    let began = stages.finish()?;
    ensure!(began[..2] == [1, 2], "only the second again: {began:?}");
    Ok(())
}

#[test]
fn cluster_resumes_a_copy_after_target_restart() -> Result<()> {
    let name = "cluster_resumes_a_copy_after_target_restart";
    let Some(mut stages) = ReplicatedRun::start(name)? else {
        return Ok(());
    };
    let (_, target) = stages.copy_nodes()?;
    stages.begin_second_copy(target)?;
    stages.world.cluster.kill(target)?;
    stages.world.cluster.restart(target)?;
    check_bytes(&stages.wait_for_copies(2)?, CHANGED_BYTES)?;
    let began = stages.finish()?;
    ensure!(began == [1, 1, 1], "stages ran again: {began:?}");
    Ok(())
}

#[test]
fn cluster_resumes_a_copy_after_scheduler_restart() -> Result<()> {
    let name = "cluster_resumes_a_copy_after_scheduler_restart";
    let Some(mut stages) = ReplicatedRun::start(name)? else {
        return Ok(());
    };
    let (_, target) = stages.copy_nodes()?;
    stages.begin_second_copy(target)?;
    let mut run = stages.scheduler.take().context("it runs")?;
    run.kill()?;
    run.wait()?;
    stages.start_scheduler()?;
    check_bytes(&stages.wait_for_copies(2)?, CHANGED_BYTES)?;
    let began = stages.finish()?;
    ensure!(began == [1, 1, 1], "stages ran again: {began:?}");
    Ok(())
}
