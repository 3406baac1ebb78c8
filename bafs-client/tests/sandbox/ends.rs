//! Cases: how a job ends by itself, what it used, and where its streams go.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use bafs_client::sandbox::{NotStarted, NotStartedReason as Reason, SandboxOutcome};
use nix::errno::Errno;
use nix::sys::signal::Signal;

use crate::Case;
use crate::agent::JobAction;
use crate::sandbox_fixture::{AgentUser, SandboxFixture};

pub(crate) const CASES: &[Case] = &[
    (
        "exit_codes_are_passed_through",
        exit_codes_are_passed_through,
    ),
    ("a_fatal_signal_is_reported", a_fatal_signal_is_reported),
    (
        "signal_dispositions_are_reset_to_defaults",
        signal_dispositions_are_reset_to_defaults,
    ),
    (
        "a_forwarded_signal_reaches_the_job",
        a_forwarded_signal_reaches_the_job,
    ),
    (
        "missing_executables_are_reported",
        missing_executables_are_reported,
    ),
    (
        "unusable_executables_are_reported",
        unusable_executables_are_reported,
    ),
    (
        "scripts_without_shebang_run_in_the_shell",
        scripts_without_shebang_run_in_the_shell,
    ),
    (
        "leftover_processes_are_killed",
        leftover_processes_are_killed,
    ),
    ("resource_usage_is_measured", resource_usage_is_measured),
    (
        "streams_are_redirected_as_requested",
        streams_are_redirected_as_requested,
    ),
    (
        "an_unusable_stream_is_reported",
        an_unusable_stream_is_reported,
    ),
    ("long_commands_arrive_whole", long_commands_arrive_whole),
];

pub(crate) const ROOT_CASES: &[Case] = &[(
    "foreign_programs_are_reported",
    foreign_programs_are_reported,
)];

fn exit_codes_are_passed_through(user: AgentUser) {
    for code in [0, 3, 75, 126, 127, 255] {
        let answer = SandboxFixture::new(user, &format!("exit {code}")).run();
        assert_eq!(answer.report.outcome, SandboxOutcome::Exited(code));
    }
    let answer = SandboxFixture::new(user, "/no/such/program").run();
    assert_eq!(answer.report.outcome, SandboxOutcome::Exited(127));
}

fn a_fatal_signal_is_reported(user: AgentUser) {
    for signal in [6, 9, 11, 15] {
        let answer =
            SandboxFixture::new(user, &format!("ulimit -c 0; kill -{signal} $$; sleep 9")).run();
        assert_eq!(answer.report.outcome, SandboxOutcome::Signaled(signal));
    }
}

fn signal_dispositions_are_reset_to_defaults(user: AgentUser) {
    let mut world = SandboxFixture::new(user, "");
    world.task.plan.program = "grep".into();
    world.task.plan.arguments = ["-E", "Sig(Blk|Ign)", "/proc/self/status"]
        .map(Into::into)
        .to_vec();
    let output = world.expect_output();
    let masks: Vec<_> = output
        .lines()
        .map(|line| u64::from_str_radix(line.split_whitespace().last().unwrap(), 16).unwrap())
        .collect();
    assert_eq!(masks[0], 0, "{output}");
    // Rust programs ignore this one; a job that writes into a closed pipe must end.
    let broken_pipe = 1 << (Signal::SIGPIPE as u64 - 1);
    assert_eq!(masks[1] & broken_pipe, 0, "{output}");
}

fn a_forwarded_signal_reaches_the_job(user: AgentUser) {
    let script =
        "trap 'echo got it; exit 5' TERM; touch /bafs-t/ready; while :; do sleep 0.01; done";
    let world = SandboxFixture::new(user, script)
        .with_agent_directory()
        .with_action(JobAction::Signal(15));
    assert_eq!(world.run().report.outcome, SandboxOutcome::Exited(5));
    assert_eq!(world.read("out"), "got it\n");

    let world = SandboxFixture::new(user, "sleep 600").with_action(JobAction::SignalAtOnce(15));
    assert_eq!(world.run().report.outcome, SandboxOutcome::Signaled(15));

    let world = SandboxFixture::new(user, "touch /bafs-t/ready; sleep 600")
        .with_agent_directory()
        .with_action(JobAction::Signal(15));
    assert_eq!(world.run().report.outcome, SandboxOutcome::Signaled(15));
}

#[track_caller]
fn refusal(world: &SandboxFixture) -> NotStarted {
    match world.run().report.outcome {
        SandboxOutcome::NotStarted(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

fn missing_executables_are_reported(user: AgentUser) {
    for program in [
        "no-such-program",
        "/no/such/program",
        "./program",
        "/etc/passwd/x",
    ] {
        let mut world = SandboxFixture::new(user, "");
        world.task.plan.program = program.into();
        let refusal = refusal(&world);
        assert_eq!(refusal.reason, Reason::ExecutableMissing, "{refusal}");
        assert!(refusal.message.contains(program), "{refusal}");
    }
}

#[track_caller]
fn check_unusable(user: AgentUser, content: &[u8], mode: u32, reason: Reason, errno: Errno) {
    let mut world = SandboxFixture::new(user, "");
    let program = world.path("program");
    fs::write(&program, content).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(mode)).unwrap();
    world.task.plan.program = program.into();
    let refusal = refusal(&world);
    assert_eq!(
        (refusal.reason, refusal.errno),
        (reason, Some(errno as i32)),
        "{refusal}"
    );
}

fn unusable_executables_are_reported(user: AgentUser) {
    let script = b"#!/bin/sh\n";
    check_unusable(
        user,
        script,
        0o644,
        Reason::ExecutableNotExecutable,
        Errno::EACCES,
    );
    check_unusable(
        user,
        b"#!/no/sh\n",
        0o755,
        Reason::InterpreterMissing,
        Errno::ENOENT,
    );
    check_unusable(
        user,
        b"\0\0\0\0",
        0o755,
        Reason::ExecutableBadFormat,
        Errno::ENOEXEC,
    );

    let mut world = SandboxFixture::new(user, "");
    world.task.plan.program = "/usr".into();
    assert_eq!(refusal(&world).reason, Reason::ExecutableNotExecutable);

    let mut world = SandboxFixture::new(user, "");
    world.task.plan.arguments = vec!["x".repeat(200_000).into()];
    assert_eq!(refusal(&world).reason, Reason::CommandTooLong);
}

fn scripts_without_shebang_run_in_the_shell(user: AgentUser) {
    let mut world = SandboxFixture::new(user, "");
    let program = world.path("script");
    fs::write(&program, "echo \"$1\"; exit 6\n").unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    world.task.plan.program = program.into();
    world.task.plan.arguments = vec!["plain words".into()];
    let answer = world.run();
    assert_eq!(answer.report.outcome, SandboxOutcome::Exited(6));
    assert_eq!(world.read("out"), "plain words\n");
}

fn foreign_programs_are_reported(user: AgentUser) {
    // The header of a program for another machine: EM_S390.
    let mut head = *b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x16\0\x01\0\0\0";
    check_unusable(
        user,
        &head,
        0o755,
        Reason::ExecutableBadFormat,
        Errno::ENOEXEC,
    );
    head[0] = 0;
    check_unusable(
        user,
        &head,
        0o755,
        Reason::ExecutableBadFormat,
        Errno::ENOEXEC,
    );
}

fn leftover_processes_are_killed(user: AgentUser) {
    // `run` itself checks that no process is left.
    let script = "setsid sleep 600 & (setsid sh -c 'trap \"\" TERM; sleep 600' &) ; exit 4";
    assert_eq!(
        SandboxFixture::new(user, script).run().report.outcome,
        SandboxOutcome::Exited(4)
    );
}

fn resource_usage_is_measured(user: AgentUser) {
    // 64 MiB in one piece, half a second of computing, a fifth of sleeping.
    let script = "dd if=/dev/zero of=/dev/null bs=64M count=1 2>/dev/null; sleep 0.2; \
                  timeout 0.5 sh -c 'while :; do :; done'; true";
    let report = SandboxFixture::new(user, script).run().report;
    let usage = report.usage.unwrap();
    assert!(usage.resident_bytes_max >= 64 << 20, "{report:?}");
    assert!(usage.resident_bytes_max < 512 << 20, "{report:?}");
    assert!(usage.user_us + usage.system_us >= 100_000, "{report:?}");
    assert!(report.wall >= Duration::from_millis(700), "{report:?}");
    assert!(report.notes.is_empty(), "{report:?}");
}

fn streams_are_redirected_as_requested(user: AgentUser) {
    let mut world = SandboxFixture::new(user, "cat; echo more; echo oops >&2; echo last")
        .with_agent_directory();
    fs::write(world.path("input"), "from the file\n").unwrap();
    world.task.input = Some(world.path("input"));
    world.task.outputs = Some(("/bafs-t/both".into(), "/bafs-t//both".into()));
    assert_eq!(world.run().report.outcome, SandboxOutcome::Exited(0));
    assert_eq!(world.read("both"), "from the file\nmore\noops\nlast\n");

    // Without an input the job reads an empty file and does not wait.
    assert_eq!(
        SandboxFixture::new(user, "wc -c").expect_output().trim(),
        "0"
    );
}

fn an_unusable_stream_is_reported(user: AgentUser) {
    let mut world = SandboxFixture::new(user, "true");
    world.task.outputs = Some(("/no/such/out".into(), "/dev/null".into()));
    let refusal = refusal(&world);
    assert_eq!(refusal.reason, Reason::StreamUnusable, "{refusal}");
    assert!(refusal.message.contains("/no/such/out"));
}

fn long_commands_arrive_whole(user: AgentUser) {
    let mut world = SandboxFixture::new(
        user,
        "printf '%s' \"$@\" | wc -c; printf %s \"$LONG\" | wc -c",
    );
    world.task.plan.arguments.push("sh".into());
    for _ in 0..9 {
        world.task.plan.arguments.push("x".repeat(100_000).into());
    }
    world
        .task
        .plan
        .environment
        .push(("LONG".into(), "y".repeat(120_000).into()));
    assert_eq!(world.expect_output(), "900000\n120000\n");
}
