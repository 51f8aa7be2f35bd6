//! The RPCs of CSI, by name.

use std::fmt;

use crate::operation::WorkClass;

macro_rules! rpcs {
    ($($service:ident: $($rpc:ident)*;)*) => {
        /// An RPC of CSI 1.13.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Rpc {
            $($(
                #[doc = concat!("`", stringify!($service), ".", stringify!($rpc), "`")]
                $rpc,
            )*)*
        }

        impl Rpc {
            /// All RPCs, by service.
            pub const ALL: &'static [Rpc] = &[$($(Rpc::$rpc,)*)*];

            /// Its name, which is unique among all services.
            pub fn name(self) -> &'static str {
                match self {
                    $($(Rpc::$rpc => stringify!($rpc),)*)*
                }
            }

            pub fn service(self) -> &'static str {
                match self {
                    $($(Rpc::$rpc => stringify!($service),)*)*
                }
            }

            /// The RPC of an HTTP/2 path, such as `/csi.v1.Node/NodeStageVolume`.
            pub fn of_path(path: &str) -> Option<Rpc> {
                match path {
                    $($(
                        concat!("/csi.v1.", stringify!($service), "/", stringify!($rpc)) => {
                            Some(Rpc::$rpc)
                        }
                    )*)*
                    _ => None,
                }
            }
        }
    };
}

rpcs! {
    Identity: GetPluginInfo GetPluginCapabilities Probe;
    Controller: CreateVolume DeleteVolume ControllerPublishVolume ControllerUnpublishVolume
        ValidateVolumeCapabilities ListVolumes ControllerListVolumeHealth
        ControllerGetVolumeHealth GetCapacity ControllerGetCapabilities CreateSnapshot
        DeleteSnapshot ListSnapshots GetSnapshot ControllerExpandVolume ControllerGetVolume
        ControllerModifyVolume;
    GroupController: GroupControllerGetCapabilities CreateVolumeGroupSnapshot
        DeleteVolumeGroupSnapshot GetVolumeGroupSnapshot;
    SnapshotMetadata: GetMetadataAllocated GetMetadataDelta;
    Node: NodeStageVolume NodeUnstageVolume NodePublishVolume NodeUnpublishVolume
        NodeGetVolumeStats NodeGetVolumeHealth NodeGetStorageHealth NodeExpandVolume
        NodeGetCapabilities NodeGetInfo;
}

impl Rpc {
    /// The group of RPCs with which it shares the driver's threads.
    pub fn class(self) -> WorkClass {
        match self {
            Rpc::NodeStageVolume
            | Rpc::NodeUnstageVolume
            | Rpc::NodePublishVolume
            | Rpc::NodeUnpublishVolume
            | Rpc::NodeExpandVolume => WorkClass::Node,
            Rpc::CreateSnapshot | Rpc::CreateVolumeGroupSnapshot => WorkClass::Cut,
            Rpc::CreateVolume
            | Rpc::DeleteVolume
            | Rpc::DeleteSnapshot
            | Rpc::DeleteVolumeGroupSnapshot
            | Rpc::ControllerExpandVolume
            | Rpc::ControllerModifyVolume => WorkClass::Long,
            _ => WorkClass::Read,
        }
    }

    /// RPCs that callers repeat all the time and that change nothing: they are logged at debug
    /// level.
    pub fn is_poll(self) -> bool {
        matches!(
            self,
            Rpc::GetPluginInfo
                | Rpc::GetPluginCapabilities
                | Rpc::Probe
                | Rpc::ControllerGetCapabilities
                | Rpc::GroupControllerGetCapabilities
                | Rpc::NodeGetCapabilities
                | Rpc::NodeGetVolumeStats
                | Rpc::NodeGetVolumeHealth
                | Rpc::NodeGetStorageHealth
                | Rpc::GetCapacity
        )
    }
}

impl fmt::Display for Rpc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prost_reflect::DescriptorPool;

    use super::*;

    #[test]
    fn the_list_is_the_interface() {
        let pool = DescriptorPool::decode(crate::csi::FILE_DESCRIPTOR_SET).unwrap();
        let interface: BTreeSet<String> = pool
            .services()
            .flat_map(|service| {
                let name = service.full_name().to_string();
                let paths = service.methods().map(|m| format!("/{name}/{}", m.name()));
                paths.collect::<Vec<_>>()
            })
            .collect();
        assert_eq!(interface.len(), Rpc::ALL.len());
        for rpc in Rpc::ALL {
            let path = format!("/csi.v1.{}/{}", rpc.service(), rpc.name());
            assert!(interface.contains(&path), "{path}");
            assert_eq!(Rpc::of_path(&path), Some(*rpc));
        }
        assert_eq!(Rpc::of_path("/csi.v1.Node/CreateVolume"), None);
    }
}
