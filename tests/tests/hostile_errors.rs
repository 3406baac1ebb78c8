//! Wrong use and lacking machines: the user is told what failed, why and what to do, at once.
#![expect(
    clippy::disallowed_methods,
    reason = "the promises are about real seconds"
)]

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bafs_tests::{TestCluster, bafs_program, printed_text, report_skip};

/// Longest time until the user is told; the scheduler's own patience would be 45 seconds.
const ERROR_DELAY_MAX: Duration = Duration::from_secs(5);

const WORKFLOW: &str = "volume v scratch 1 MB\njob j {\nexecutable = /bin/true\n}\nmount v j /v\n";

#[test]
fn demo_and_run_name_missing_requirements_at_once() -> Result<()> {
    let name = "demo_and_run_name_missing_requirements_at_once";
    let is_root = nix::unistd::geteuid().is_root();
    let device = std::fs::metadata("/dev/fuse").map(|found| found.permissions().mode() & 0o7);
    if !is_root || device.is_ok_and(|others| others == 6) {
        report_skip(
            name,
            "it needs root, and a /dev/fuse that is closed to others",
        );
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o777))?;
    let copy = directory.path().join("bafs");
    std::fs::copy(bafs_program(), &copy)?;
    let workflow = directory.path().join("test.bafs");
    std::fs::write(&workflow, WORKFLOW)?;
    let workflow = workflow.to_string_lossy().into_owned();
    for args in [
        &["demo", "--small"][..],
        &["run", "--local", "2", &workflow],
    ] {
        let started = Instant::now();
        let output = Command::new("setpriv")
            .args(["--reuid=12345", "--regid=12345", "--clear-groups"])
            .arg(&copy)
            .args(args)
            .env("TMPDIR", directory.path())
            .output()?;
        let text = printed_text(&output);
        ensure!(output.status.code() == Some(1), text);
        ensure!(
            started.elapsed() < ERROR_DELAY_MAX,
            "{:?}: {text}",
            started.elapsed()
        );
        ensure!(text.contains("/dev/fuse") && text.contains("to do:"), text);
    }
    Ok(())
}

#[test]
fn description_errors_show_the_line_of_their_file() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let workflow = directory.path().join("test.bafs");
    std::fs::write(&workflow, "job j one.submit\n")?;
    let job = "executable = /bin/true\nenvironment = A=1;B=two words\n";
    std::fs::write(directory.path().join("one.submit"), job)?;
    let output = Command::new(bafs_program())
        .arg("check")
        .arg(&workflow)
        .output()?;
    let text = printed_text(&output);
    ensure!(output.status.code() == Some(1), text);
    ensure!(text.contains("one.submit:2:"), text);
    ensure!(text.contains("2 | environment = A=1;B=two words"), text);
    Ok(())
}

#[test]
fn cluster_refuses_a_foreign_identity_at_once() -> Result<()> {
    let world = TestCluster::start(&["20MB"])?;
    let stranger = tempfile::tempdir()?;
    let identity = stranger.path().join("cluster");
    let made = Command::new(bafs_program())
        .arg("init")
        .arg(&identity)
        .output()?;
    ensure!(made.status.success(), printed_text(&made));
    let workflow = world.write_workflow("job j {\nexecutable = /bin/true\n}\n")?;
    let workflow = workflow.to_string_lossy();
    for args in [&["servers"][..], &["run", &workflow]] {
        let mut command = world.bafs_command(args);
        let output = command.env("BAFS_IDENTITY", &identity).output()?;
        let text = printed_text(&output);
        ensure!(output.status.code() == Some(1), "{args:?}: {text}");
        ensure!(text.contains("PeerRefused"), "{args:?}: {text}");
    }
    Ok(())
}

#[test]
fn cluster_refuses_and_hides_terminal_control_names() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let at = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    let trace = at("\u{1b}[2Jtrace.csv");
    std::fs::write(&trace, "nonsense\n")?;
    let export = at("export");
    std::fs::create_dir(&export)?;
    let (missing, store) = (at("\u{1b}[31mred.bafs"), at("store"));
    let world = TestCluster::start(&["20MB"])?;
    for args in [
        &["check", &missing][..],
        &["graph", &trace],
        &["volume", "show", "\u{1b}[31mred"],
        &["home", "--export", &export, "--name", "a\u{1b}[31m"],
        &["node", "--store", &store, "--size", "1MB", "--name", "x\ny"],
        &[
            "node", "--store", &store, "--size", "1MB", "--group", "\u{9b}2J",
        ],
    ] {
        let output = world.bafs_command(args).output()?;
        let text = printed_text(&output);
        let code = match args[0] {
            // No URL can carry such a name of a home, which is wrong use.
            "home" => 2,
            "volume" => 4,
            _ => 1,
        };
        ensure!(output.status.code() == Some(code), "{args:?}: {text}");
        ensure!(!text.contains(['\u{1b}', '\u{9b}']), "{args:?}: {text:?}");
        if args[0] == "home" || args[0] == "node" {
            let remedy = if args[0] == "home" {
                "letters"
            } else {
                "control"
            };
            ensure!(text.contains(remedy), "{args:?}: {text}");
        }
    }
    Ok(())
}

#[test]
fn cluster_lists_only_the_first_home_per_name() -> Result<()> {
    let world = TestCluster::start(&["20MB"])?;
    world.wait_for_servers(2)?;
    let export = tempfile::tempdir()?;
    let mut second = world
        .bafs_command(&["home", "--until-stdin-closes", "--export"])
        .arg(export.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let stderr = second.stderr.take().context("standard error is piped")?;
    let said = BufReader::new(stderr).lines().map_while(Result::ok);
    let warned = said.into_iter().find(|line| line.contains("catalog"));
    let warned = warned.context("it says nothing")?;
    let first = world.cluster.address("home");
    ensure!(warned.contains(&format!("the home at {first}")), warned);
    ensure!(warned.contains("--name"), warned);
    let servers = world.run_json(&["servers"])?;
    let servers = servers.as_array().context("a list")?;
    let homes = servers.iter().filter(|it| it["kind"] == "home");
    let homes: Vec<_> = homes.map(|it| it["address"].as_str()).collect();
    ensure!(homes == [Some(first)], "{homes:?}");
    drop(second.stdin.take());
    second.wait()?;
    Ok(())
}

#[test]
fn cluster_commands_distinguish_usage_errors_by_exit_code() -> Result<()> {
    let world = TestCluster::start(&["20MB"])?;
    let workflow = world.write_workflow("job j {\nexecutable = /bin/true\n}\n")?;
    let workflow = workflow.to_string_lossy();
    let create = ["volume", "create", "v", "--node", "n1", "--size"];
    for args in [
        &["exec", "--mount", "work", "--", "/bin/true"][..],
        &["exec", "--mount", "work:/proc", "--", "/bin/true"],
        &["exec", "--mount", "work:/dev/shm/z", "--", "/bin/true"],
        &[&create[..], &["1"]].concat(),
        &[&create[..], &["0"]].concat(),
        &["run", &workflow, "--resource-timeout", "x"],
        &["run", &workflow, "--local", "1", "--resource-timeout", "x"],
        &["run", &workflow, "--local", "1", "--home-rate", "x"],
        &["run", &workflow, "--local", "0"],
        &["home", "--export", "/tmp", "--rate-limit", "x"],
        &["catalog", "--listen", "47000"],
        &["mount", "work", "/no/such/directory"],
    ] {
        let output = world.bafs_command(args).output()?;
        let text = printed_text(&output);
        ensure!(output.status.code() == Some(2), "{args:?}: {text}");
        ensure!(text.contains("bafs: "), "{args:?}: {text}");
    }
    let exec = |catalog: &str, more: &[&str]| {
        let mut command = world.bafs_command(&["exec", "--mount", "nosuch:/a"]);
        command.args(more).args(["--", "/bin/true"]);
        command.env("BAFS_CATALOG", catalog).output()
    };
    let output = exec(world.cluster.catalog_address(), &[])?;
    let words = "bafs: no volume 'nosuch' on any live node; see `bafs volume list`\n";
    ensure!(output.stderr == words.as_bytes(), printed_text(&output));
    let mut command = world.bafs_command(&["exec", "--", "/bin/true"]);
    let output = command.env("TMPDIR", "/no/such").output()?;
    let words = "bafs: cannot create a directory in /no/such: no such directory; set TMPDIR to a \
                 directory that is there\n";
    ensure!(output.stderr == words.as_bytes(), printed_text(&output));
    ensure!(output.status.code() == Some(75), printed_text(&output));
    for (catalog, reason) in [
        (world.cluster.catalog_address(), "NotFound"),
        ("127.0.0.1:9", "Unreachable"),
    ] {
        let output = exec(catalog, &["--json"])?;
        let text = printed_text(&output);
        ensure!(output.status.code() == Some(75), text);
        let line: serde_json::Value = serde_json::from_slice(&output.stderr)?;
        ensure!(line["reason"] == reason, text);
        ensure!(line["volume"] == "nosuch", text);
    }
    Ok(())
}
