//! The wheels of PyTorch 2.13.0.

use super::Wheel;

/// The wheels that PyTorch 2.13.0's metadata pins, resolved: the CPU set first.
pub(super) const LINUX_X86: [Wheel; 16] = [
    Wheel {
        file: "torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        sha256: "60fcdcb2f3876e21146cb4524ef06397d727ca9ad5f020818547e25075fe3cb7",
    },
    Wheel {
        file: "nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    },
    Wheel {
        file: "nvidia_cuda_cupti-13.0.85-py3-none-manylinux_2_25_x86_64.whl",
        sha256: "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
    },
    Wheel {
        file: "nvidia_cublas-13.1.1.3-py3-none-manylinux_2_27_x86_64.whl",
        sha256: "37936a16db8fe4ac1f065c2139360608a543a09275cb1a1af612e08cfa065436",
    },
    Wheel {
        file: "nvidia_cuda_nvrtc-13.0.88-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl",
        sha256: "ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575",
    },
    Wheel {
        file: "nvidia_cudnn_cu13-9.20.0.48-py3-none-manylinux_2_27_x86_64.whl",
        sha256: "0c45dd8eeb50b603f07995b1b300c62ffe6a1980482b82b3bcf94a4ca9d49304",
    },
    Wheel {
        file: "nvidia_cufft-12.0.0.61-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "6c44f692dce8fd5ffd3e3df134b6cdb9c2f72d99cf40b62c32dde45eea9ddad3",
    },
    Wheel {
        file: "nvidia_cufile-1.15.1.6-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "08a3ecefae5a01c7f5117351c64f17c7c62efa5fffdbe24fc7d298da19cd0b44",
    },
    Wheel {
        file: "nvidia_curand-10.4.0.35-py3-none-manylinux_2_27_x86_64.whl",
        sha256: "1aee33a5da6e1db083fe2b90082def8915f30f3248d5896bcec36a579d941bfc",
    },
    Wheel {
        file: "nvidia_cusolver-12.0.4.66-py3-none-manylinux_2_27_x86_64.whl",
        sha256: "0a759da5dea5c0ea10fd307de75cdeb59e7ea4fcb8add0924859b944babf1112",
    },
    Wheel {
        file: "nvidia_cusparse-12.6.3.3-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "2b3c89c88d01ee0e477cb7f82ef60a11a4bcd57b6b87c33f789350b59759360b",
    },
    Wheel {
        file: "nvidia_cusparselt_cu13-0.8.1-py3-none-manylinux2014_x86_64.whl",
        sha256: "786ce87568c303fadb5afcc7102d454cd3040d75f6f8626f5db460d1871f4dd0",
    },
    Wheel {
        file: "nvidia_nccl_cu13-2.29.7-py3-none-manylinux_2_18_x86_64.whl",
        sha256: "edd81538446786ec3b73972543e53bb43bcaf0bfc8ef76cb679fcc390ffe136d",
    },
    Wheel {
        file: "nvidia_nvjitlink-13.5.37-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl",
        sha256: "280d7cb9649704145f074b8dbde500de04ce02d0872e066e20a83c17bcaa93eb",
    },
    Wheel {
        file: "nvidia_nvshmem_cu13-3.4.5-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "290f0a2ee94c9f3687a02502f3b9299a9f9fe826e6d0287ee18482e78d495b80",
    },
    Wheel {
        file: "nvidia_nvtx-13.0.85-py3-none-manylinux1_x86_64.manylinux_2_5_x86_64.whl",
        sha256: "4936d1d6780fbe68db454f5e72a42ff64d1fd6397df9f363ae786930fd5c1cd4",
    },
];

/// The same for Arm.
pub(super) const LINUX_ARM: [Wheel; 16] = [
    Wheel {
        file: "torch-2.13.0-cp311-cp311-manylinux_2_28_aarch64.whl",
        sha256: "092790c696a760c729fd5722835f50b9d81fd7c8f141571f3f3cf4081a8f664c",
    },
    Wheel {
        file: "nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55",
    },
    Wheel {
        file: "nvidia_cuda_cupti-13.0.85-py3-none-manylinux_2_25_aarch64.whl",
        sha256: "796bd679890ee55fb14a94629b698b6db54bcfd833d391d5e94017dd9d7d3151",
    },
    Wheel {
        file: "nvidia_cublas-13.1.1.3-py3-none-manylinux_2_27_aarch64.whl",
        sha256: "b7a210458267ac818974c53038fbec2e969d5c99f305ab15c72522fa9f001dd5",
    },
    Wheel {
        file: "nvidia_cuda_nvrtc-13.0.88-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "d27f20a0ca67a4bb34268a5e951033496c5b74870b868bacd046b1b8e0c3267b",
    },
    Wheel {
        file: "nvidia_cudnn_cu13-9.20.0.48-py3-none-manylinux_2_27_aarch64.whl",
        sha256: "e31454ae00094b0c55319d9d15b6fa2fc50a9e1c0f5c8c80fb75258234e731e1",
    },
    Wheel {
        file: "nvidia_cufft-12.0.0.61-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "2708c852ef8cd89d1d2068bdbece0aa188813a0c934db3779b9b1faa8442e5f5",
    },
    Wheel {
        file: "nvidia_cufile-1.15.1.6-py3-none-manylinux_2_27_aarch64.whl",
        sha256: "bdc0deedc61f548bddf7733bdc216456c2fdb101d020e1ab4b88d232d5e2f6d1",
    },
    Wheel {
        file: "nvidia_curand-10.4.0.35-py3-none-manylinux_2_27_aarch64.whl",
        sha256: "133df5a7509c3e292aaa2b477afd0194f06ce4ea24d714d616ff36439cee349a",
    },
    Wheel {
        file: "nvidia_cusolver-12.0.4.66-py3-none-manylinux_2_27_aarch64.whl",
        sha256: "02c2457eaa9e39de20f880f4bd8820e6a1cfb9f9a34f820eb12a155aa5bc92d2",
    },
    Wheel {
        file: "nvidia_cusparse-12.6.3.3-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "80bcc4662f23f1054ee334a15c72b8940402975e0eab63178fc7e670aa59472c",
    },
    Wheel {
        file: "nvidia_cusparselt_cu13-0.8.1-py3-none-manylinux2014_aarch64.whl",
        sha256: "4dca476c50bf4780d46cd0bfbd82e2bc10a08e4fef7950917ce8d7578d22a23f",
    },
    Wheel {
        file: "nvidia_nccl_cu13-2.29.7-py3-none-manylinux_2_18_aarch64.whl",
        sha256: "674a12383e3c38a1bcccae7d4f3633b37852230b6047883cb2f4c2d1b36d9bf5",
    },
    Wheel {
        file: "nvidia_nvjitlink-13.5.37-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "893f6f9a55b2720ed94913b5ba3332e972da8c78dfa2863d0244403dbd528ffc",
    },
    Wheel {
        file: "nvidia_nvshmem_cu13-3.4.5-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "6dc2a197f38e5d0376ad52cd1a2a3617d3cdc150fd5966f4aee9bcebb1d68fe9",
    },
    Wheel {
        file: "nvidia_nvtx-13.0.85-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "cb7780edb6b14107373c835bf8b72e7a178bac7367e23da7acb108f973f157a6",
    },
];

/// On Apple silicon one wheel is enough: it contains no CUDA.
pub(super) const MAC_ARM: [Wheel; 1] = [Wheel {
    file: "torch-2.13.0-cp311-cp311-macosx_14_0_arm64.whl",
    sha256: "e76f9bcecc52b8ff711239a2f7547d5353df95878ab232f0773c1d95928b92f8",
}];
