//! Real jobs in real name spaces, as root and as an ordinary user. The program is test runner,
//! agent and job stage at once, because the sandbox starts `/proc/self/exe` anew.
#![allow(
    clippy::unwrap_used,
    reason = "all of this is test, but clippy looks for `#[test]`"
)]

mod agent;
mod ends;
mod image;
mod kills;
mod paths;
mod sandbox_fixture;
mod temporary;

use std::env;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

use sandbox_fixture::AgentUser;

/// A test that runs under one user.
type Case = (&'static str, fn(AgentUser));

fn main() -> ExitCode {
    bafs_client::sandbox::dispatch_job_init();
    if env::args().nth(1).as_deref() == Some(agent::ROLE) {
        return agent::main();
    }
    let cases = [
        paths::CASES,
        temporary::CASES,
        image::CASES,
        ends::CASES,
        kills::CASES,
    ]
    .concat();
    let trials = cases.into_iter().flat_map(|(name, run)| {
        [AgentUser::Root, AgentUser::User]
            .map(|who| named_trial(format!("{who:?}::{name}").to_lowercase(), who, run))
    });
    let root_only = paths::ROOT_CASES
        .iter()
        .chain(ends::ROOT_CASES)
        .chain(kills::ROOT_CASES)
        .map(|(name, run)| named_trial(format!("root::{name}"), AgentUser::Root, *run));
    libtest_mimic::run(&Arguments::from_args(), trials.chain(root_only).collect()).exit_code()
}

fn named_trial(name: String, user: AgentUser, run: fn(AgentUser)) -> Trial {
    let shown = name.clone();
    Trial::test(name, move || {
        match user.missing_requirement() {
            Some(reason) => sandbox_fixture::announce_skip(&shown, &reason),
            None => run(user),
        }
        Ok(())
    })
}
