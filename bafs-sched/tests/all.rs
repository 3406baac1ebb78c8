//! The tests of this crate from outside as one program, for each program is linked with all again.

mod driver;
mod driver_cancelled_run;
mod driver_output;
mod driver_unavailable_sources;
mod driver_unreachable_home;
mod earlier_work;
mod home_aliases;
mod one_node;
mod small_caches;
mod stories;
mod strategy_rules;
mod uncounted_access;
mod waiting_reasons;
