//! Slackwater: a CSI driver for the disks a node already has.

pub mod agent;
pub mod backend;
pub mod cli;
pub mod config;
pub mod csi;
pub mod cut;
pub mod demo;
pub mod doctor;
pub mod error;
pub mod hook;
pub mod host;
pub mod model;
pub mod operation;
pub mod record;
pub mod router;
pub mod server;
pub mod service;
pub mod telemetry;
pub mod tls;
