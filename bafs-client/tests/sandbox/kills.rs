//! Cases: jobs, stages and agents that are killed, and what is left of them: nothing.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use bafs_client::sandbox::{JobSession, JobUser, KILL_MAX, SandboxOutcome};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::Case;
use crate::agent::{AgentResult, JobAction};
use crate::sandbox_fixture::{AgentUser, HostSnapshot, SandboxFixture, UNUSED_USER_ID};

pub(crate) const CASES: &[Case] = &[
    ("a_stubborn_job_is_killed", a_stubborn_job_is_killed),
    ("a_daemonising_job_is_killed", a_daemonising_job_is_killed),
    ("a_stopped_job_is_killed", a_stopped_job_is_killed),
    (
        "a_rapidly_forking_job_is_killed",
        a_rapidly_forking_job_is_killed,
    ),
    (
        "a_job_is_killed_before_it_starts",
        a_job_is_killed_before_it_starts,
    ),
    ("a_stopped_init_is_killed", a_stopped_init_is_killed),
    (
        "a_killed_agent_leaves_nothing",
        a_killed_agent_leaves_nothing,
    ),
    (
        "an_agent_killed_early_leaves_nothing",
        an_agent_killed_early_leaves_nothing,
    ),
    (
        "a_killed_agent_ends_its_stopped_init",
        a_killed_agent_ends_its_stopped_init,
    ),
    (
        "a_killed_outer_stage_is_detected",
        a_killed_outer_stage_is_detected,
    ),
    ("a_killed_init_is_detected", a_killed_init_is_detected),
    (
        "ctrl_c_on_shared_terminals_reaches_the_job",
        ctrl_c_on_shared_terminals_reaches_the_job,
    ),
    (
        "the_stages_ignore_polite_signals",
        the_stages_ignore_polite_signals,
    ),
];

pub(crate) const ROOT_CASES: &[Case] = &[(
    "a_killed_agent_ends_another_users_stopped_init",
    a_killed_agent_ends_another_users_stopped_init,
)];

/// Escapes in every usual way: daemons, sessions, ignored signals.
const ESCAPE_SCRIPT: &str = "trap '' TERM INT HUP; \
    (setsid sh -c 'trap \"\" TERM HUP; sleep 600; sleep 600' >/dev/null 2>&1 &); \
    (nohup setsid sleep 600 >/dev/null 2>&1 </dev/null &); ";

#[track_caller]
fn check_killed(world: &SandboxFixture) -> AgentResult {
    let answer = world.run();
    let reason = "the test says so".to_owned();
    assert_eq!(
        answer.report.outcome,
        SandboxOutcome::Killed(reason),
        "{answer:?}"
    );
    assert!(answer.kill_time.unwrap() < KILL_MAX, "{answer:?}");
    answer
}

fn a_stubborn_job_is_killed(user: AgentUser) {
    let script = "trap '' TERM INT HUP; touch /bafs-t/ready; while :; do sleep 1; done";
    let answer = check_killed(
        &SandboxFixture::new(user, script)
            .with_agent_directory()
            .with_action(JobAction::Kill),
    );
    // Init was asked, and had the time to count.
    assert!(answer.report.usage.is_some(), "{answer:?}");
}

fn a_daemonising_job_is_killed(user: AgentUser) {
    let script = format!("{ESCAPE_SCRIPT} sleep 0.1; touch /bafs-t/ready; sleep 600");
    check_killed(
        &SandboxFixture::new(user, &script)
            .with_agent_directory()
            .with_action(JobAction::Kill),
    );
}

fn a_stopped_job_is_killed(user: AgentUser) {
    let script = "(sleep 0.1; touch /bafs-t/ready) & kill -STOP $$";
    check_killed(
        &SandboxFixture::new(user, script)
            .with_agent_directory()
            .with_action(JobAction::Kill),
    );
}

fn a_rapidly_forking_job_is_killed(user: AgentUser) {
    // Every process is gone before its number could be used.
    let script = "spin() { while :; do (:) & wait; done; }; \
                  spin & spin & touch /bafs-t/ready; spin";
    check_killed(
        &SandboxFixture::new(user, script)
            .with_agent_directory()
            .with_action(JobAction::Kill),
    );
}

fn a_job_is_killed_before_it_starts(user: AgentUser) {
    let world = SandboxFixture::new(user, "touch /bafs-t/ran; sleep 600")
        .with_agent_directory()
        .with_action(JobAction::KillAtOnce);
    check_killed(&world);
}

fn a_stopped_init_is_killed(user: AgentUser) {
    let world = SandboxFixture::new(user, "touch /bafs-t/started; sleep 600")
        .with_agent_directory()
        .with_action(JobAction::Kill);
    let mut agent = world.spawn();
    world.wait_for_file("started");
    signal(&world, "job-init inner", Signal::SIGSTOP);
    std::fs::write(world.path("ready"), "").unwrap();
    assert!(agent.wait().unwrap().success());
    world.assert_no_processes(Duration::ZERO);
    let answer: AgentResult = serde_json::from_str(&world.read("answer")).unwrap();
    assert!(
        matches!(answer.report.outcome, SandboxOutcome::Killed(_)),
        "{answer:?}"
    );
    assert!(answer.kill_time.unwrap() < KILL_MAX, "{answer:?}");
}

#[track_caller]
fn signal(world: &SandboxFixture, process: &str, signal: Signal) {
    kill(Pid::from_raw(world.process(process)), signal).unwrap();
}

/// Runs the job until it is ready, does `act`, and expects all processes to be gone soon.
#[track_caller]
fn check_nothing_left(user: AgentUser, act: impl FnOnce(&SandboxFixture)) -> SandboxFixture {
    check_nothing_left_of(user, JobUser::SameUser, act)
}

#[track_caller]
fn check_nothing_left_of(
    user: AgentUser,
    identity: JobUser,
    act: impl FnOnce(&SandboxFixture),
) -> SandboxFixture {
    let before = HostSnapshot::take();
    let script = format!("{ESCAPE_SCRIPT} sleep 0.1; touch /bafs-t/started; sleep 600");
    let mut world = SandboxFixture::new(user, &script)
        .with_agent_directory()
        .with_volume("/mydata")
        .with_volume("/xyz/share/db");
    std::fs::set_permissions(world.path(""), Permissions::from_mode(0o777)).unwrap();
    world.task.plan.user = identity;
    let mut agent = world.spawn();
    world.wait_for_file("started");
    // Agent, two stages, shell, two daemons; and sleeps that may not have begun.
    assert!(world.processes().len() >= 6, "{:?}", world.processes());
    // The agent's mounts are its own even while it runs.
    before.assert_unchanged();
    act(&world);
    agent.wait().unwrap();
    world.assert_no_processes(KILL_MAX);
    before.assert_unchanged();
    world
}

fn a_killed_agent_leaves_nothing(user: AgentUser) {
    check_nothing_left(user, |world| signal(world, " agent ", Signal::SIGKILL));
}

fn an_agent_killed_early_leaves_nothing(user: AgentUser) {
    let before = HostSnapshot::take();
    // From before the first stage to after the job's start, in steps.
    for millis in 0..30 {
        let world = SandboxFixture::new(user, &format!("{ESCAPE_SCRIPT} sleep 600"))
            .with_volume("/xyz/share/db");
        let mut agent = world.spawn();
        std::thread::sleep(Duration::from_millis(millis));
        agent.kill().unwrap();
        agent.wait().unwrap();
        world.assert_no_processes(KILL_MAX);
    }
    before.assert_unchanged();
}

fn a_killed_agent_ends_its_stopped_init(user: AgentUser) {
    check_nothing_left(user, |world| {
        signal(world, "job-init inner", Signal::SIGSTOP);
        signal(world, "job-init outer", Signal::SIGSTOP);
        signal(world, " agent ", Signal::SIGKILL);
    });
}

fn a_killed_agent_ends_another_users_stopped_init(user: AgentUser) {
    let identity = JobUser::OtherUser {
        uid: UNUSED_USER_ID,
        gid: UNUSED_USER_ID,
        groups: vec![],
    };
    check_nothing_left_of(user, identity, |world| {
        signal(world, "job-init inner", Signal::SIGSTOP);
        signal(world, "job-init outer", Signal::SIGSTOP);
        signal(world, " agent ", Signal::SIGKILL);
    });
}

#[track_caller]
fn check_interrupted(world: &SandboxFixture) {
    let answer: AgentResult = serde_json::from_str(&world.read("answer")).unwrap();
    assert!(
        matches!(answer.report.outcome, SandboxOutcome::Interrupted(_)),
        "{answer:?}"
    );
}

fn a_killed_outer_stage_is_detected(user: AgentUser) {
    let kill_it = |world: &SandboxFixture| signal(world, "job-init outer", Signal::SIGKILL);
    check_interrupted(&check_nothing_left(user, kill_it));
}

fn a_killed_init_is_detected(user: AgentUser) {
    let kill_it = |world: &SandboxFixture| signal(world, "job-init inner", Signal::SIGKILL);
    check_interrupted(&check_nothing_left(user, kill_it));
}

fn the_stages_ignore_polite_signals(user: AgentUser) {
    let script = "touch /bafs-t/started; while ! test -e /bafs-t/go; do sleep 0.01; done; exit 6";
    let world = SandboxFixture::new(user, script).with_agent_directory();
    let mut agent = world.spawn();
    world.wait_for_file("started");
    for signo in [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGTSTP,
    ] {
        signal(&world, "job-init outer", signo);
        signal(&world, "job-init inner", signo);
    }
    std::fs::write(world.path("go"), "").unwrap();
    assert!(agent.wait().unwrap().success());
    let answer: AgentResult = serde_json::from_str(&world.read("answer")).unwrap();
    assert_eq!(answer.report.outcome, SandboxOutcome::Exited(6));
}

fn ctrl_c_on_shared_terminals_reaches_the_job(user: AgentUser) {
    let script = "trap 'exit 8' INT; touch /bafs-t/started; while :; do sleep 0.01; done";
    let mut world = SandboxFixture::new(user, script).with_agent_directory();
    world.task.plan.session = JobSession::SharedTerminal;
    let (mut terminal, mut keys) = world.spawn_in_terminal();
    world.wait_for_file("started");
    keys.write_all(b"\x03").unwrap();
    assert!(
        terminal.wait().unwrap().success(),
        "{}",
        world.read("agent.err")
    );
    world.assert_no_processes(Duration::ZERO);
    let answer: AgentResult = serde_json::from_str(&world.read("answer")).unwrap();
    assert_eq!(answer.report.outcome, SandboxOutcome::Exited(8));

    // With a session of its own the job hears nothing of the terminal's keys.
    let script = "trap 'exit 8' INT; touch /bafs-t/started; \
                  while ! test -e /bafs-t/go; do sleep 0.01; done; exit 9";
    let world = SandboxFixture::new(user, script).with_agent_directory();
    let (mut terminal, mut keys) = world.spawn_in_terminal();
    world.wait_for_file("started");
    keys.write_all(b"\x03").unwrap();
    std::thread::sleep(Duration::from_millis(200));
    std::fs::write(world.path("go"), "").unwrap();
    assert!(
        terminal.wait().unwrap().success(),
        "{}",
        world.read("agent.err")
    );
    let answer: AgentResult = serde_json::from_str(&world.read("answer")).unwrap();
    assert_eq!(answer.report.outcome, SandboxOutcome::Exited(9));
}
