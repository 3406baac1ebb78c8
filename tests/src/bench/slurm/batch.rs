//! The batch system of a benchmark: private daemons of Slurm or of Grid Engine.

use std::process::Command;

use anyhow::Result;

use crate::batch_systems::{GridEngineCluster, ProcessTracking, SlurmCluster, SlurmOptions};

/// Daemons that run.
pub(super) enum Batch {
    Slurm(SlurmCluster),
    GridEngine(GridEngineCluster),
}

impl Batch {
    pub(super) fn start_slurm(nodes: usize) -> Result<Self> {
        let options = SlurmOptions {
            nodes,
            ..SlurmOptions::default()
        };
        SlurmCluster::start(&options).map(Self::Slurm)
    }

    pub(super) fn start_grid_engine(slots: usize) -> Result<Self> {
        GridEngineCluster::start(slots).map(Self::GridEngine)
    }

    pub(super) fn engine_name(&self) -> &'static str {
        match self {
            Self::Slurm(_) => "slurm",
            Self::GridEngine(_) => "sge",
        }
    }

    pub(super) fn describe(&self) -> String {
        match self {
            Self::Slurm(slurm) => match slurm.tracking() {
                ProcessTracking::ControlGroup => "slurmd, proctrack/cgroup".to_owned(),
                ProcessTracking::ProcessTree => {
                    "slurmd, proctrack/linuxproc: this kernel has no control groups".to_owned()
                }
            },
            Self::GridEngine(_) => "one sge_execd".to_owned(),
        }
    }

    /// Variables that lead commands to it.
    pub(super) fn environment(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Slurm(slurm) => {
                let (name, path) = slurm.environment();
                vec![(name, path.display().to_string())]
            }
            Self::GridEngine(engine) => engine.environment(),
        }
    }

    /// Cancels a job as its user does; answers whether the batch system agreed.
    pub(super) fn cancel(&self, id: &str) -> Result<bool> {
        let mut command = match self {
            Self::Slurm(slurm) => slurm.command("scancel"),
            Self::GridEngine(engine) => engine.command("qdel"),
        };
        Ok(command.arg(id).output()?.status.success())
    }

    /// Kills the daemon of a compute node, whose jobs go on without it. Grid Engine has one here,
    /// and keeps it.
    pub(super) fn kill_daemon(&mut self) {
        if let Self::Slurm(slurm) = self {
            slurm.kill_node(1);
        }
    }

    /// Jobs that the batch system knows, waiting or running.
    pub(super) fn count_jobs(&self) -> Result<usize> {
        let (mut command, heading) = match self {
            Self::Slurm(slurm) => {
                let mut command = slurm.command("squeue");
                command.arg("-h");
                (command, 0)
            }
            Self::GridEngine(engine) => (engine.command("qstat"), 2),
        };
        Ok(count_lines(&mut command)?.saturating_sub(heading))
    }
}

fn count_lines(command: &mut Command) -> Result<usize> {
    let output = command.output()?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().count())
}
