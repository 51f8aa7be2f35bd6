//! Health of volumes and of the node's storage (alpha in CSI 1.13).

use crate::backend::PoolSpace;
use crate::error::{Result, chain};
use crate::model::VolumeId;
use crate::model::size::is_low_space;
use crate::operation::{Finding, ListVolumes, Pool, ServingState, Severity, VolumeHealth, Volumes};
use crate::record::VolumeRecord;

impl Volumes {
    /// Health of one volume; a volume without findings is healthy.
    pub fn volume_health(&self, volume_id: &str) -> Result<VolumeHealth> {
        let (pool, id, record) = self.pools.get_volume_even_if_fenced(volume_id)?;
        Ok(self.examine(&pool, id, &record))
    }

    /// Health of all volumes, in pages like those of ListVolumes.
    pub fn list_volume_health(&self, request: &ListVolumes) -> Result<(Vec<VolumeHealth>, String)> {
        let (page, next_token) = self.page(request)?;
        let each = page.iter().map(|(pool, record)| {
            self.examine(
                pool,
                VolumeId {
                    pool: pool.id(),
                    uuid: record.uuid,
                },
                record,
            )
        });
        Ok((each.collect(), next_token))
    }

    /// Health of the pools of this node.
    pub fn storage_health(&self) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        for state in self.pools.states() {
            match state {
                ServingState::Refused {
                    definition, why, ..
                } => findings.push(Finding {
                    severity: Severity::Inaccessible,
                    reason: "PoolNotServed",
                    message: format!("pool {}: {why}", definition.name),
                }),
                ServingState::Serving(pool) => findings.extend(pool_findings(&pool)),
            }
        }
        findings.extend(self.usage.lost_devices().into_iter().map(|path| Finding {
            severity: Severity::Inaccessible,
            reason: "DeviceLost",
            message: format!(
                "a raw block volume is published at {}, but its device was detached; delete its pod",
                path.display()
            ),
        }));
        Ok(findings)
    }

    fn examine(&self, pool: &Pool, id: VolumeId, record: &VolumeRecord) -> VolumeHealth {
        let mut findings = Vec::new();
        let changed = self.usage.changed_devices().into_iter();
        findings.extend(
            changed
                .filter(|changed| changed.uuid == record.uuid)
                .map(|changed| Finding {
                    severity: Severity::Degraded,
                    reason: "DeviceChanged",
                    message: changed.problem,
                }),
        );
        match pool.backend.devices().list(record.uuid) {
            Err(error) => findings.push(Finding {
                severity: Severity::Inaccessible,
                reason: "ImageUnreadable",
                message: chain(&error),
            }),
            Ok(devices) if devices.len() > 1 => findings.push(Finding {
                severity: Severity::Degraded,
                reason: "SeveralDevices",
                message: format!(
                    "{} devices show the image; unmount and detach all but one",
                    devices.len()
                ),
            }),
            Ok(_) => {}
        }
        match pool.backend.image_problem(record) {
            Ok(None) => {}
            Ok(Some(message)) => findings.push(Finding {
                severity: Severity::DataLoss,
                reason: "ImageIncomplete",
                message,
            }),
            Err(error) => findings.push(Finding {
                severity: Severity::Inaccessible,
                reason: "ImageUnreachable",
                message: chain(&error),
            }),
        }
        VolumeHealth { id, findings }
    }
}

fn pool_findings(pool: &Pool) -> Vec<Finding> {
    let name = &pool.definition.name;
    let mut findings = Vec::new();
    match pool.backend.space() {
        Err(error) => findings.push(Finding {
            severity: Severity::Inaccessible,
            reason: "PoolUnreadable",
            message: format!("pool {name}: {}", chain(&error)),
        }),
        Ok(PoolSpace {
            total, available, ..
        }) if is_low_space(available, total) => findings.push(Finding {
            severity: Severity::Degraded,
            reason: "PoolNearlyFull",
            message: format!("pool {name} has {available} of {total} bytes left"),
        }),
        Ok(_) => {}
    }
    let damaged = pool.damaged();
    if !damaged.is_empty() {
        findings.push(Finding {
            severity: Severity::Degraded,
            reason: "DamagedRecords",
            message: format!(
                "pool {name} has {} records that cannot be read",
                damaged.len()
            ),
        });
    }
    findings
}
