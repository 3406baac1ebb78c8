//! Workflows on clusters of real processes: what comes home, and what failures do to it.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::batch_systems::wait_until;
use bafs_tests::{TestCluster, mount_obstacle, printed_text, processes_matching, report_skip};

/// Four pipelines of two jobs: `count` reads shared data and its own input, `sum` what it wrote.
/// `slow` seconds pass in each first job.
fn pipeline_workflow(count: u32, slow: &str) -> String {
    format!(
        "volume data cache bafs://home/data 1 MB\n\
         for i in 1..{count}\n\
         volume in$(i) scratch 100 KB files 10 from bafs://home/in/$(i).txt\n\
         volume work$(i) scratch 1 MB files 10\n\
         job count$(i) {{\n\
           executable = /bin/sh\n\
           arguments = -c \"sleep {slow}; cat /data/*/*.txt /in/$(i).txt > /scratch/all; \
           wc -l < /scratch/all > /scratch/lines\"\n\
         }}\n\
         job sum$(i) {{\n\
           executable = /bin/sh\n\
           arguments = -c \"cksum < /scratch/all > /scratch/sum; \
           cat /scratch/lines >> /scratch/sum\"\n\
         }}\n\
         parent count$(i) child sum$(i)\n\
         mount data count$(i) /data\n\
         mount in$(i) count$(i) /in ro\n\
         mount work$(i) count$(i) /scratch\n\
         mount work$(i) sum$(i) /scratch\n\
         extract work$(i) sum bafs://home/out/$(i)\n\
         end\n"
    )
}

/// Input for [`pipeline_workflow`], and what each output must be.
fn write_input(world: &TestCluster, count: u32) -> Result<Vec<Vec<u8>>> {
    let mut shared = Vec::new();
    for file in ["a/one.txt", "a/two.txt", "b/three.txt"] {
        let text: String = (0..3_000).map(|line| format!("{file} {line}\n")).collect();
        world.write_home(&format!("data/{file}"), text.as_bytes())?;
        shared.extend(text.into_bytes());
    }
    let mut expected = Vec::new();
    for i in 1..=count {
        let own = format!("input of {i}\n");
        world.write_home(&format!("in/{i}.txt"), own.as_bytes())?;
        let all = [shared.clone(), own.into_bytes()].concat();
        expected.push(checksum(&all)?);
    }
    Ok(expected)
}

fn checksum(all: &[u8]) -> Result<Vec<u8>> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), all)?;
    let script = "cksum < $0; wc -l < $0";
    let output = std::process::Command::new("sh")
        .args(["-c", script])
        .arg(file.path())
        .output()?;
    Ok(output.stdout)
}

fn check_output(world: &TestCluster, expected: &[Vec<u8>]) -> Result<()> {
    for (index, sum) in expected.iter().enumerate() {
        let found = world.read_home(&format!("out/{}", index + 1))?;
        ensure!(
            found == *sum,
            "output {} differs from a run on plain files",
            index + 1
        );
    }
    Ok(())
}

fn check_nothing_left(world: &TestCluster) -> Result<()> {
    let volumes = world.run_json(&["volume", "list"])?;
    ensure!(
        volumes.as_array().is_some_and(Vec::is_empty),
        "volumes are left: {volumes}"
    );
    let identity = world.cluster.identity();
    let agents = processes_matching(&format!("agent --identity {}", identity.display()));
    ensure!(agents.is_empty(), "agents are left: {agents:?}");
    Ok(())
}

fn start_cluster(name: &str, node_sizes: &[&str]) -> Result<Option<TestCluster>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(None);
    }
    let world = TestCluster::start(node_sizes)?;
    world.wait_for_servers(node_sizes.len() + 1)?;
    Ok(Some(world))
}

fn start_run(world: &TestCluster, workflow: &str) -> Result<Child> {
    let mut command = world.bafs_command(&["run", workflow, "--json"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().context("bafs run starts")
}

fn wait_for_output(world: &TestCluster, path: &str) -> Result<()> {
    for _ in 0..600 {
        if world.read_home(path).is_ok() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    anyhow::bail!("{path} did not come home")
}

#[test]
fn cluster_runs_a_workflow() -> Result<()> {
    let Some(world) = start_cluster("cluster_runs_a_workflow", &["20MB", "30MB"])? else {
        return Ok(());
    };
    let expected = write_input(&world, 4)?;
    let path = world.write_workflow(&pipeline_workflow(4, "0"))?;
    let output = world
        .bafs_command(&["run", &path.to_string_lossy()])
        .output()?;
    ensure!(output.status.success(), printed_text(&output));
    check_output(&world, &expected)?;
    check_nothing_left(&world)
}

/// The first stage waits until the test has seen what the second one will read.
#[test]
fn cluster_warms_the_next_level_during_this_one() -> Result<()> {
    let name = "cluster_warms_the_next_level_during_this_one";
    let Some(world) = start_cluster(name, &["60MB", "60MB"])? else {
        return Ok(());
    };
    let (first, second) = (vec![1; 300_000], vec![2; 9_000_000]);
    world.write_home("first/a", &first)?;
    world.write_home("second/b", &second)?;
    let (all, go) = (first.len() + second.len(), world.home.path().join("go"));
    let path = world.write_workflow(&format!(
        "volume first cache bafs://home/first 1 MB\n\
         volume second cache bafs://home/second 10 MB warm\n\
         for i in 1..2\nvolume out$(i) scratch 100 KB files 10\n\
         job wait$(i) {{\nexecutable = /bin/sh\n\
         arguments = -c \"cksum < /first/a; until test -e {go}; do sleep 0.1; done\"\n}}\n\
         job sum$(i) {{\nexecutable = /bin/sh\n\
         arguments = -c \"cksum < /second/b > /out/sum\"\n}}\n\
         parent wait1 wait2 child sum$(i)\n\
         mount first wait$(i) /first\nmount second sum$(i) /second\n\
         mount out$(i) sum$(i) /out\nextract out$(i) sum bafs://home/out/$(i)\nend\n",
        go = go.display()
    ))?;
    let api = bafs_tests::api::BlockingClient::new(&world.cluster.identity())?;
    let sent = || -> Result<u64> {
        let counters = api.block_on(api.client().read_counters(world.cluster.home_address()))?;
        Ok(counters.get("home_read_bytes").copied().unwrap_or(0))
    };
    let run = start_run(&world, &path.to_string_lossy())?;
    let mut tries = 0;
    while sent()? < all as u64 && tries < 600 {
        std::thread::sleep(Duration::from_millis(50));
        tries += 1;
    }
    let before = sent()?;
    std::fs::write(&go, b"")?;
    let output = run.wait_with_output()?;
    ensure!(output.status.success(), printed_text(&output));
    ensure!(
        before == all as u64,
        "home sent {before} bytes of {all} before the second stage began"
    );
    ensure!(sent()? == before, "home sent {} bytes in all", sent()?);
    let sum = checksum(&second)?;
    let sum = sum.split(|byte| *byte == b'\n').next().unwrap_or_default();
    ensure!(
        world.read_home("out/1")?.trim_ascii_end() == sum,
        "the sum is wrong"
    );
    check_nothing_left(&world)
}

/// Of so few jobs each is reason enough to plan again, also the last one.
#[test]
fn cluster_runs_few_jobs_by_a_plan() -> Result<()> {
    let Some(world) = start_cluster("cluster_runs_few_jobs_by_a_plan", &["20MB", "30MB"])? else {
        return Ok(());
    };
    let expected = write_input(&world, 2)?;
    let path = world.write_workflow(&pipeline_workflow(2, "0"))?;
    let environment = world.home.path().join("environment.toml");
    let rates = "home-rate = \"10 MB/s\"\nlocal-rate = \"10 MB/s\"\n";
    let nodes = "[[nodes]]\ncount = 2\ncpus = 1\nstorage = \"20 MB\"\n";
    std::fs::write(&environment, format!("{rates}{nodes}"))?;
    let (path, environment) = (path.to_string_lossy(), environment.to_string_lossy());
    let output = world
        .bafs_command(&["run", &path, "--plan", &environment])
        .output()?;
    ensure!(output.status.success(), printed_text(&output));
    check_output(&world, &expected)?;
    check_nothing_left(&world)
}

#[test]
fn cluster_runs_a_workflow_with_remote_io() -> Result<()> {
    let name = "cluster_runs_a_workflow_with_remote_io";
    let Some(world) = start_cluster(name, &["20MB"])? else {
        return Ok(());
    };
    let expected = write_input(&world, 2)?;
    let path = world.write_workflow(&pipeline_workflow(2, "0"))?;
    let output = world
        .bafs_command(&["run", &path.to_string_lossy(), "--remote-io"])
        .output()?;
    ensure!(output.status.success(), printed_text(&output));
    check_output(&world, &expected)?;
    let left = world.home.path().join(".bafs-remote");
    ensure!(
        bafs_tests::is_gone_or_empty(&left),
        "{} is left",
        left.display()
    );
    Ok(())
}

#[test]
fn remote_io_shows_a_source_of_one_file() -> Result<()> {
    let Some(world) = start_cluster("remote_io_shows_a_source_of_one_file", &["20MB"])? else {
        return Ok(());
    };
    std::fs::write(world.home.path().join("only"), "one\n")?;
    let path = world.write_workflow(
        "volume c cache bafs://home/only 1 MB\nvolume o scratch 1 MB\n\
         job a {\nexecutable = cp\narguments = /c/only /o/r\n}\n\
         mount c a /c\nmount o a /o\nextract o r bafs://home/r\n",
    )?;
    let output = world
        .bafs_command(&["run", &path.to_string_lossy(), "--remote-io"])
        .output()?;
    ensure!(output.status.success(), printed_text(&output));
    ensure!(world.read_home("r")? == b"one\n", "the result is wrong");
    Ok(())
}

#[test]
fn cluster_survives_a_killed_scheduler() -> Result<()> {
    let name = "cluster_survives_a_killed_scheduler";
    let Some(world) = start_cluster(name, &["20MB"])? else {
        return Ok(());
    };
    let expected = write_input(&world, 4)?;
    let log = world.home.path().join("started");
    // Each first job says on the host that it started: finished ones must not start again.
    let text = pipeline_workflow(4, "1").replace(
        "sleep 1;",
        &format!("echo $(i) >> {}; sleep 1;", log.display()),
    );
    let path = world.write_workflow(&text)?;
    let mut first = start_run(&world, &path.to_string_lossy())?;
    wait_for_output(&world, "out/1")?;
    first.kill()?;
    first.wait()?;
    let started = std::fs::read_to_string(&log)?;
    let output = start_run(&world, &path.to_string_lossy())?.wait_with_output()?;
    ensure!(output.status.success(), printed_text(&output));
    check_output(&world, &expected)?;
    let all = std::fs::read_to_string(&log)?;
    ensure!(all.starts_with(&started), "the log was rewritten");
    ensure!(all.lines().count() == 4, "jobs ran again: {all}");
    check_nothing_left(&world)
}

#[test]
fn cluster_survives_a_killed_node() -> Result<()> {
    let name = "cluster_survives_a_killed_node";
    let Some(mut world) = start_cluster(name, &["20MB", "20MB", "20MB"])? else {
        return Ok(());
    };
    let expected = write_input(&world, 6)?;
    let path = world.write_workflow(&pipeline_workflow(6, "2"))?;
    let run = start_run(&world, &path.to_string_lossy())?;
    std::thread::sleep(Duration::from_millis(1_500));
    world.cluster.kill("n2")?;
    let output = run.wait_with_output()?;
    ensure!(output.status.success(), printed_text(&output));
    check_output(&world, &expected)?;
    check_nothing_left(&world)
}

/// Somebody tidies up: what the jobs of that node do not find any more is not their fault.
#[test]
fn cluster_survives_removal_of_a_served_store() -> Result<()> {
    let name = "cluster_survives_removal_of_a_served_store";
    let Some(world) = start_cluster(name, &["20MB", "20MB", "20MB"])? else {
        return Ok(());
    };
    let expected = write_input(&world, 6)?;
    let path = world.write_workflow(&pipeline_workflow(6, "4"))?;
    let run = start_run(&world, &path.to_string_lossy())?;
    let volumes = world.cluster.directory().join("n2/volumes");
    let has_some = || std::fs::read_dir(&volumes).is_ok_and(|found| found.count() > 0);
    for _ in 0..200 {
        if has_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    ensure!(has_some(), "a job has its volumes there");
    // It has begun, and writes later.
    std::thread::sleep(Duration::from_millis(1_000));
    // What is being made there meanwhile may come back for a moment.
    for _ in 0..1_000 {
        let _ = std::fs::remove_dir_all(&volumes);
        if !volumes.exists() {
            break;
        }
    }
    let output = run.wait_with_output()?;
    ensure!(output.status.success(), printed_text(&output));
    check_output(&world, &expected)?;
    check_nothing_left(&world)?;
    let log = std::fs::read_to_string(world.cluster.directory().join("n2.log"))?;
    ensure!(log.contains("somebody removed it"), "{log}");
    Ok(())
}

#[test]
fn cluster_reports_failed_jobs_and_keeps_finished_work() -> Result<()> {
    let name = "cluster_reports_failed_jobs_and_keeps_finished_work";
    let Some(world) = start_cluster(name, &["20MB"])? else {
        return Ok(());
    };
    let log = world.home.path().join("tries");
    let text = format!(
        "volume v scratch 1 MB\nvolume w scratch 1 MB\nvolume x scratch 1 MB\n\
         job good {{\nexecutable = /bin/sh\narguments = -c \"echo fine > /v/out\"\n}}\n\
         job bad {{\nexecutable = /bin/sh\n\
         arguments = -c \"echo x >> {}; echo that went wrong >&2; exit 3\"\n}}\n\
         job killed {{\nexecutable = /bin/sh\narguments = -c \"kill -SEGV $$\"\n}}\n\
         job gone {{\nexecutable = /no/such/program\n}}\n\
         mount v good /v\nmount w bad /w\nmount x killed /x\nmount w gone /w\n\
         parent bad child gone\nretry bad 2\nextract v out bafs://home/out/good\n\
         extract w out bafs://home/out/bad\n",
        log.display()
    );
    let path = world.write_workflow(&text)?;
    let output = world
        .bafs_command(&["run", &path.to_string_lossy(), "--keep-going"])
        .output()?;
    let text = printed_text(&output);
    ensure!(
        output.status.code() == Some(1),
        "exit 1 was expected: {text}"
    );
    ensure!(
        std::fs::read_to_string(&log)?.lines().count() == 3,
        "one try and two retries"
    );
    ensure!(
        world.read_home("out/good")? == b"fine\n",
        "finished work is at home"
    );
    for part in ["bad", "3", "that went wrong", "killed", "11"] {
        ensure!(
            text.contains(part),
            "the report does not say '{part}': {text}"
        );
    }
    check_nothing_left(&world)
}

#[test]
fn cluster_names_the_errors_of_a_workflow() -> Result<()> {
    let name = "cluster_names_the_errors_of_a_workflow";
    let Some(world) = start_cluster(name, &["20MB"])? else {
        return Ok(());
    };
    let job = "job j {\nexecutable = /bin/true\n}\nmount v j /v\n";
    let cases = [
        ("volume v scratch 1 TB\n", "v"),
        ("volume v cache bafs://home/nowhere 1 MB\n", "nowhere"),
        (
            "volume v scratch 1 MB from bafs://home/nothing.txt\n",
            "nothing.txt",
        ),
    ];
    for (index, (volume, named)) in cases.into_iter().enumerate() {
        let path = world.write_workflow(&format!("{volume}{job}"))?;
        let journal = world.home.path().join(format!("journal{index}"));
        let output = world
            .bafs_command(&[
                "run",
                &path.to_string_lossy(),
                "--journal",
                &journal.to_string_lossy(),
            ])
            .output()?;
        let text = printed_text(&output);
        ensure!(
            output.status.code() == Some(1),
            "{volume}: exit 1 was expected: {text}"
        );
        ensure!(
            text.contains(named),
            "{volume}: '{named}' is not named: {text}"
        );
    }
    let path = world.write_workflow(
        "volume v scratch 1 MB\njob j {\nexecutable = /no/such/program\n}\nmount v j /v\n",
    )?;
    let journal = world.home.path().join("journal");
    let output = world
        .bafs_command(&[
            "run",
            &path.to_string_lossy(),
            "--journal",
            &journal.to_string_lossy(),
        ])
        .output()?;
    ensure!(output.status.code() == Some(1), printed_text(&output));
    ensure!(
        printed_text(&output).contains("/no/such/program"),
        printed_text(&output)
    );
    check_nothing_left(&world)
}

#[test]
fn cluster_reruns_jobs_with_larger_volumes() -> Result<()> {
    let name = "cluster_reruns_jobs_with_larger_volumes";
    let Some(world) = start_cluster(name, &["100MB"])? else {
        return Ok(());
    };
    let path = world.write_workflow(
        "volume w scratch 10 MB\njob j {\nexecutable = /bin/dd\n\
         arguments = if=/dev/zero of=/w/out bs=1M count=15\n}\nmount w j /w\n\
         extract w out bafs://home/out\n",
    )?;
    let output = start_run(&world, &path.to_string_lossy())?.wait_with_output()?;
    ensure!(output.status.success(), printed_text(&output));
    ensure!(
        world.read_home("out")?.len() == 15 << 20,
        "the whole file came"
    );
    for part in [
        "'j' ran out of space in volume 'w'",
        "runs again once with 20.0 MB",
    ] {
        ensure!(
            printed_text(&output).contains(part),
            "'{part}' is not said: {}",
            printed_text(&output)
        );
    }
    check_nothing_left(&world)
}

#[test]
fn cluster_keeps_refused_results_until_home_accepts() -> Result<()> {
    let name = "cluster_keeps_refused_results_until_home_accepts";
    let Some(world) = start_cluster(name, &["20MB"])? else {
        return Ok(());
    };
    let path = world.write_workflow(
        "volume w scratch 1 MB\njob j {\nexecutable = /bin/sh\n\
         arguments = -c \"sleep 2; echo fine > /w/out\"\n}\nmount w j /w\n\
         extract w out bafs://home/results/out\n",
    )?;
    let mut run = world.bafs_command(&["run", &path.to_string_lossy(), "--resource-timeout", "2s"]);
    let run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let journal = PathBuf::from(format!("{}.journal", path.display()));
    wait_until(Duration::from_secs(20), || Ok(journal.exists()))?;
    // Since it looked, a file is where a directory should be.
    world.write_home("results", b"in the way")?;
    let output = run.wait_with_output()?;
    ensure!(output.status.code() == Some(1), printed_text(&output));
    let told = printed_text(&output);
    let command = told.split("bafs volume extract ").nth(1);
    let command = command.with_context(|| format!("no way to fetch it is told: {told}"))?;
    let words: Vec<&str> = command.split_whitespace().take(3).collect();
    std::fs::remove_file(world.home.path().join("results"))?;
    let arguments = [&["volume", "extract"][..], &words].concat();
    let fetched = world.bafs_command(&arguments).output()?;
    ensure!(fetched.status.success(), printed_text(&fetched));
    ensure!(
        world.read_home("results/out")? == b"fine\n",
        "the result is at home"
    );
    Ok(())
}
