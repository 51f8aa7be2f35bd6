//! Slackwater: a CSI driver for the disks a node already has.
