//! Upgrades of running servers: they start again from their program file, and jobs notice nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::batch_systems::wait_until;
use bafs_tests::{TestCluster, bafs_program, exec_job, mount_obstacle, printed_text, report_skip};
use nix::sys::signal::Signal;

const TIMEOUT: Duration = Duration::from_secs(30);

/// All servers of a cluster here.
const SERVERS: [&str; 3] = ["catalog", "home", "n1"];

/// A cluster whose servers run a copy of the program, which can be replaced.
fn start_cluster(program: &PathBuf) -> Result<TestCluster> {
    fs::copy(bafs_program(), program)?;
    let world = TestCluster::start_with_spec(&["100MB"], |spec| spec.program.clone_from(program))?;
    world.wait_for_servers(2)?;
    Ok(world)
}

/// Puts another file in the place of the program, as a package manager does.
fn replace_program(program: &PathBuf) -> Result<()> {
    let new = program.with_extension("new");
    fs::copy(bafs_program(), &new)?;
    Ok(fs::rename(new, program)?)
}

/// Whether a server runs the file that is at the program's path now.
fn has_new_program(world: &TestCluster, name: &str) -> Result<bool> {
    let link = fs::read_link(format!("/proc/{}/exe", world.cluster.pid(name)?))?;
    let is_new = !link.to_string_lossy().ends_with(" (deleted)");
    let listed = world.run_json(&["servers"])?;
    Ok(is_new && listed.to_string().contains(world.cluster.address(name)))
}

#[test]
fn cluster_upgraded_node_waits_for_its_jobs() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("cluster_upgraded_node_waits_for_its_jobs", &reason);
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let program = directory.path().join("bafs");
    let world = start_cluster(&program)?;
    let home = world.home.path().display().to_string();
    let text = format!(
        "volume v scratch 1 MB\njob a {{\nexecutable = /bin/sh\narguments = -c \"echo a >> \
         {home}/begun; until test -e {home}/go; do sleep 0.05; done; echo kept > /v/part\"\n}}\n\
         job b {{\nexecutable = /bin/sh\narguments = -c \"cat /v/part > /v/whole\"\n}}\n\
         mount v a /v\nmount v b /v\nparent a child b\nextract v whole bafs://home/whole\n"
    );
    let workflow = world.write_workflow(&text)?.display().to_string();
    let mut command = world.bafs_command(&["run", &workflow, "--json"]);
    let run = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let begun = world.home.path().join("begun");
    wait_until(TIMEOUT, || Ok(begun.exists())).context("the first job begins")?;
    let pid = world.cluster.pid("n1")?;
    replace_program(&program)?;
    world.cluster.signal("n1", Signal::SIGUSR2)?;
    std::thread::sleep(Duration::from_secs(2));
    ensure!(
        !has_new_program(&world, "n1")?,
        "it does not wait for its job"
    );
    world.write_home("go", b"")?;
    let output = run.wait_with_output()?;
    ensure!(output.status.success(), "{}", printed_text(&output));
    ensure!(world.read_home("whole")? == b"kept\n");
    ensure!(
        fs::read_to_string(begun)?.lines().count() == 1,
        "the first job ran again"
    );
    ensure!(has_new_program(&world, "n1")?, "it did not start again");
    ensure!(
        world.cluster.pid("n1")? == pid,
        "the process is another one"
    );
    Ok(())
}

#[test]
fn cluster_upgrade_interrupts_no_writer() -> Result<()> {
    let test = "cluster_upgrade_interrupts_no_writer";
    if exec_job::start_cluster(test, "20MB")?.is_none() {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let program = directory.path().join("bafs");
    let world = start_cluster(&program)?;
    world.run_json(&["volume", "create", "v", "--node", "n1", "--size", "10MB"])?;
    // Without it, the program writes over the network, as one on another machine does.
    fs::remove_file(world.cluster.directory().join("n1").join("handoff.sock"))?;
    let script = "for k in $(seq 60); do echo $k >> /v/lines; sleep 0.05; done; cat /v/lines";
    let mut command =
        world.bafs_command(&["exec", "--mount", "v:/v", "--", "/bin/sh", "-euc", script]);
    let writer = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    std::thread::sleep(Duration::from_secs(1));
    replace_program(&program)?;
    for name in ["n1", "home", "catalog"] {
        world.cluster.signal(name, Signal::SIGUSR2)?;
    }
    let output = writer.wait_with_output()?;
    ensure!(output.status.success(), "{}", printed_text(&output));
    let expected: String = (1..=60).map(|k| format!("{k}\n")).collect();
    ensure!(
        String::from_utf8(output.stdout)? == expected,
        "lines are missing"
    );
    for name in ["n1", "home"] {
        wait_until(TIMEOUT, || has_new_program(&world, name)).context(name)?;
    }
    Ok(())
}

/// The file that a server runs; fails for one that has ended.
fn running_program(world: &TestCluster, name: &str) -> Result<PathBuf> {
    let link = format!("/proc/{}/exe", world.cluster.pid(name)?);
    fs::read_link(link).with_context(|| format!("{name} has ended"))
}

#[test]
fn cluster_server_outlives_a_broken_program_file() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let program = directory.path().join("bafs");
    let world = start_cluster(&program)?;
    let old = directory.path().join("bafs.old");
    fs::rename(&program, &old)?;
    // Not executable, and then no program.
    for mode in [0o644, 0o755] {
        fs::write(&program, "#!/nowhere/sh\n")?;
        fs::set_permissions(&program, fs::Permissions::from_mode(mode))?;
        for name in SERVERS {
            world.cluster.signal(name, Signal::SIGUSR2)?;
        }
        std::thread::sleep(Duration::from_secs(1));
        for name in SERVERS {
            ensure!(
                running_program(&world, name)? == old,
                "{name} mode {mode:o}"
            );
        }
    }
    world.wait_for_servers(2)?;
    // What is there then takes their place, not the file that they were started from.
    replace_program(&program)?;
    for name in SERVERS {
        world.cluster.signal(name, Signal::SIGUSR2)?;
        let is_new = || Ok(running_program(&world, name)? == program);
        wait_until(TIMEOUT, is_new).context(name)?;
    }
    world.wait_for_servers(2)
}

#[test]
fn cluster_server_survives_repeated_restart_signals() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let program = directory.path().join("bafs");
    let world = start_cluster(&program)?;
    replace_program(&program)?;
    for gap_ms in [0, 1, 5, 20, 50, 100, 200, 5, 20, 50] {
        for name in SERVERS {
            world.cluster.signal(name, Signal::SIGUSR2)?;
        }
        std::thread::sleep(Duration::from_millis(gap_ms));
    }
    for name in SERVERS {
        let is_new = || Ok(running_program(&world, name)? == program);
        wait_until(TIMEOUT, is_new).context(name)?;
    }
    world.wait_for_servers(2)
}

#[test]
fn cluster_run_ignores_the_restart_signal() -> Result<()> {
    let test = "cluster_run_ignores_the_restart_signal";
    let Some(world) = exec_job::start_cluster(test, "20MB")? else {
        return Ok(());
    };
    let begun = world.home.path().join("begun");
    let text = format!(
        "job a {{\nexecutable = /bin/sh\narguments = -c \"touch {0}; sleep 2; trap 'echo heard > \
         {0}' USR2; kill -USR2 $$\"\n}}\n",
        begun.display()
    );
    let workflow = world.write_workflow(&text)?.display().to_string();
    let mut command = world.bafs_command(&["run", &workflow]);
    let run = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let pid = nix::unistd::Pid::from_raw(i32::try_from(run.id())?);
    wait_until(TIMEOUT, || Ok(begun.exists())).context("the job begins")?;
    nix::sys::signal::kill(pid, Signal::SIGUSR2)?;
    let output = run.wait_with_output()?;
    ensure!(output.status.success(), "{}", printed_text(&output));
    // Jobs have the signal as every program has it.
    ensure!(
        fs::read_to_string(begun)? == "heard\n",
        "the job did not hear it"
    );
    Ok(())
}
