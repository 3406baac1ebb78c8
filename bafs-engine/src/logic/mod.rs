//! Decisions about pilots. Pure: events in, actions out.

mod pool_controller;
mod pool_event;

pub use pool_controller::PoolController;
pub use pool_event::{
    Demand, NodeUse, PauseReason, PilotNumber, PilotStatus, PilotSummary, PoolAction, PoolEvent,
    PoolSettings,
};
