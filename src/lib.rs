//! Slackwater: a CSI driver for the disks a node already has.

pub mod csi;
