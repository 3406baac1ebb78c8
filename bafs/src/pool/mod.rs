//! `bafs pool`: nodes as pilots on a batch system. `bafs run --pool` uses the same parts.

mod pilot_node;
mod pool_description;
mod pool_directory;
mod pool_driver;
mod pool_end;
mod run_pool;

use anyhow::{Context, Result, bail};
use bafs_client::signals::wait_for_stop_signal;
use bafs_engine::PilotState;
use bafs_engine::logic::Demand;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::sync::watch;

use crate::args::{PoolAddArgs, PoolCommand, PoolDryRunArgs};
use crate::client::ClusterClient;
use crate::output::Printer;

pub(crate) use pilot_node::find_own_address;
use pool_description::{REMOVE_TIMEOUT_S, describe_pool, open_pool_engine, pool_settings};
use pool_directory::PoolDirectory;
use pool_driver::PoolDriver;
use pool_end::end_pilots;
pub(crate) use run_pool::{PoolCluster, RunPool, RunPoolSpec, choose_address, end_abandoned_pools};

/// Runs the command.
pub(crate) async fn run_pool_command(command: PoolCommand, output: Printer) -> Result<()> {
    match command {
        PoolCommand::Add(args) => add_pool(args, output).await,
        PoolCommand::List => list_pools(output).await,
        PoolCommand::Remove(args) => remove_pool(&args.name, output).await,
        PoolCommand::DryRun(args) => check_pool(&args, output).await,
        PoolCommand::Pilot(args) => pilot_node::run_pilot_node(args, output).await,
    }
}

async fn add_pool(args: PoolAddArgs, output: Printer) -> Result<()> {
    let client = ClusterClient::new(&args.client)?;
    let mut file = describe_pool(args.size, &args.node_size, &args.pilots)?;
    file.catalog.clone_from(&args.client.catalog);
    let asked = wait_for_stop_signal();
    let directory = PoolDirectory::open_or_create(&args.name, &file, &args.client.identity)?;
    let engine = open_pool_engine(&file)?;
    let controller = directory.resume_controller(pool_settings(&file))?;
    let demand = Demand {
        nodes: file.nodes_max,
        longest_job_s: 0,
    };
    let (_demand, demanded) = watch::channel(demand);
    let (close, closed) = watch::channel(false);
    let driver = PoolDriver::new(engine, controller, directory, client, file);
    let driven = driver.run(demanded, closed, move |line| {
        let _ = output.print_result(line, &serde_json::json!({ "event": line }));
    });
    let stop = async {
        asked.await;
        let _ = close.send(true);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        ended = driven => ended,
        () = stop => Ok(()),
    }
}

async fn list_pools(output: Printer) -> Result<()> {
    let mut pools = Vec::new();
    for directory in PoolDirectory::list()? {
        let file = directory.read_file()?;
        let pilots = directory.read_state()?.pilots;
        let engine = open_pool_engine(&file)?;
        let ids: Vec<_> = pilots.iter().filter_map(|pilot| pilot.pilot_id()).collect();
        let polled = tokio::task::spawn_blocking(move || engine.poll(&ids)).await?;
        let states = polled.as_ref().ok();
        let rows: Vec<_> = pilots
            .iter()
            .map(|pilot| {
                let id = pilot.pilot_id();
                let state = id.as_ref().and_then(|id| states?.get(id).copied());
                serde_json::json!({
                    "pilot": pilot.number, "id": id.map(|id| id.0), "state": state_name(state),
                })
            })
            .collect();
        pools.push(serde_json::json!({
            "name": directory.name(),
            "engine": file.engine,
            "nodes_max": file.nodes_max,
            "is_served": directory.controller_pid().is_some(),
            "pilots": rows,
        }));
    }
    let line = |pool: &serde_json::Value| {
        let served = if pool["is_served"] == true {
            ""
        } else {
            ", no controller"
        };
        let mut text = format!(
            "{} ({}:{}{served})",
            pool["name"].as_str().unwrap_or_default(),
            pool["engine"].as_str().unwrap_or_default(),
            pool["nodes_max"]
        );
        for pilot in pool["pilots"].as_array().into_iter().flatten() {
            let id = pilot["id"].as_str().unwrap_or("-");
            let state = pilot["state"].as_str().unwrap_or_default();
            text += &format!("\n  pilot {} id {id}: {state}", pilot["pilot"]);
        }
        text
    };
    let text: Vec<String> = pools.iter().map(line).collect();
    output.print_result(&text.join("\n"), &pools)
}

fn state_name(state: Option<PilotState>) -> &'static str {
    match state {
        Some(PilotState::Waiting) => "waiting",
        Some(PilotState::Running { .. }) => "running",
        Some(PilotState::Ending) => "ending",
        Some(PilotState::Ended) => "ended",
        None => "unknown",
    }
}

async fn remove_pool(name: &str, output: Printer) -> Result<()> {
    let directory = PoolDirectory::open(name)?;
    if let Some(pid) = directory.controller_pid() {
        kill(Pid::from_raw(pid), Signal::SIGTERM).context("cannot stop the pool's command")?;
        for _ in 0..REMOVE_TIMEOUT_S * 10 {
            if !directory.exists() {
                return output.print_result("removed", &serde_json::json!({ "removed": name }));
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        bail!("pool {name} has not ended after {REMOVE_TIMEOUT_S} s; its command still runs");
    }
    end_pilots(directory).await?;
    output.print_result("removed", &serde_json::json!({ "removed": name }))
}

async fn check_pool(args: &PoolDryRunArgs, output: Printer) -> Result<()> {
    let file = describe_pool(args.size, "1 GB", &args.pilots)?;
    let engine = open_pool_engine(&file)?;
    let scratch = tempfile::tempdir()?;
    let script = scratch.path().join("pilot.sh");
    std::fs::write(&script, "#!/bin/sh\n")?;
    let pilot = pool_directory::pilot_spec(&file, "bafs-dry-run-0", scratch.path());
    let answer = tokio::task::spawn_blocking(move || {
        let pilot = bafs_engine::PilotSpec { script, ..pilot };
        engine.check(&pilot)
    });
    answer
        .await?
        .context("the batch system would not accept a pilot")?;
    let engine = &file.engine;
    output.print_result(
        &format!("{engine} would accept a pilot; nothing was submitted"),
        &serde_json::json!({ "engine": engine, "accepted": true }),
    )
}
