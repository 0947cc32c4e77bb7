fold:                                   ; @fold
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_branch .LBB0_0
.LBB0_0:
	s_barrier
	s_cbranch_scc1 .LBB0_2
.LBB0_2:
	s_cbranch_scc1 .LBB0_4
	s_branch .LBB0_5
.LBB0_4:
.LBB0_5:
	s_cbranch_vccnz .LBB0_9
	v_lshlrev_b32_e32 v17, 2, v8
.LBB0_7:
	v_ashrrev_i32_e32 v9, 31, v8
	v_lshl_add_u64 v[22:23], v[0:1], 0, v[8:9]
	global_load_dwordx2 v[30:31], v[22:23], off
	s_waitcnt lgkmcnt(0)
	s_barrier
	ds_read2_b64 v[22:25], v19 offset1:4
	ds_read2_b64 v[26:29], v19 offset0:128 offset1:132
	ds_read_u8 v9, v20
	ds_read_u8 v21, v20 offset:64
	ds_read_u8 v32, v20 offset:128
	ds_read_u8 v33, v20 offset:192
	ds_read_u8 v34, v20 offset:320
	ds_read_u8 v35, v20 offset:448
	ds_read_u8 v36, v20 offset:256
	ds_read_u8 v37, v20 offset:384
	s_waitcnt lgkmcnt(9)
	v_mfma_f32_16x16x32_fp8_fp8 a[4:7], v[22:23], v[6:7], 0
	s_waitcnt lgkmcnt(3)
	v_lshlrev_b16_e32 v22, 8, v34
	s_waitcnt lgkmcnt(2)
	v_lshlrev_b16_e32 v23, 8, v35
	s_waitcnt lgkmcnt(1)
	v_or_b32_e32 v22, v36, v22
	v_mfma_f32_16x16x32_fp8_fp8 a[8:11], v[26:27], v[6:7], 0
	s_waitcnt lgkmcnt(0)
	v_or_b32_sdwa v23, v37, v23 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD
	v_lshlrev_b16_e32 v21, 8, v21
	v_or_b32_sdwa v23, v22, v23 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:DWORD
	v_mfma_f32_16x16x32_fp8_fp8 a[4:7], v[24:25], v[4:5], a[4:7]
	v_lshlrev_b16_e32 v26, 8, v33
	v_or_b32_e32 v9, v9, v21
	v_or_b32_sdwa v21, v32, v26 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD
	v_mfma_f32_16x16x32_fp8_fp8 a[8:11], v[28:29], v[4:5], a[8:11]
	s_add_i32 s3, s3, 32
	v_add_u32_e32 v8, 0x800, v8
	s_cmp_lt_i32 s3, s2
	v_accvgpr_read_b32 v22, a4
	v_accvgpr_read_b32 v24, a5
	v_exp_f32_e32 v22, v22
	v_exp_f32_e32 v24, v24
	v_accvgpr_read_b32 v27, a8
	v_accvgpr_read_b32 v28, a9
	v_exp_f32_e32 v27, v27
	v_exp_f32_e32 v28, v28
	v_accvgpr_read_b32 v25, a6
	v_accvgpr_read_b32 v26, a7
	v_accvgpr_read_b32 v29, a10
	v_accvgpr_read_b32 v32, a11
	v_exp_f32_e32 v25, v25
	v_exp_f32_e32 v26, v26
	v_exp_f32_e32 v29, v29
	v_exp_f32_e32 v32, v32
	v_cvt_pk_fp8_f32 v22, v22, v24
	v_cvt_pk_fp8_f32 v24, v27, v28
	s_waitcnt lgkmcnt(0)
	s_barrier
	v_cvt_pk_fp8_f32 v22, v25, v26 op_sel:[0,0,1]
	v_cvt_pk_fp8_f32 v24, v29, v32 op_sel:[0,0,1]
	s_waitcnt vmcnt(0)
	ds_write_b64 v16, v[30:31]
	v_cndmask_b32_e32 v25, v24, v22, vcc
	v_cndmask_b32_e32 v22, v22, v24, vcc
	ds_bpermute_b32 v25, v17, v25
	ds_bpermute_b32 v26, v18, v22
	v_or_b32_sdwa v22, v9, v21 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:DWORD
	s_waitcnt lgkmcnt(0)
	v_cndmask_b32_e64 v24, v26, v25, s[0:1]
	v_cndmask_b32_e64 v25, v25, v26, s[0:1]
	s_nop 1
	v_mfma_f32_16x16x32_fp8_fp8 a[0:3], v[22:23], v[24:25], a[0:3]
	s_cbranch_scc1 .LBB0_7
.LBB0_9:
	s_cbranch_scc1 .LBB0_11
.LBB0_11:
	v_exp_f32_e32 v13, v13
	s_cbranch_vccnz .LBB0_13
	v_lshlrev_b16_e32 v8, 8, v8
.LBB0_13:
	s_endpgm
.Lfunc_end0:
  - .agpr_count:     12
    .private_segment_fixed_size: 0
    .sgpr_count:     20
    .sgpr_spill_count: 0
    .vgpr_count:     52
    .vgpr_spill_count: 0
; codeLenInByte = 1828
; Occupancy: 8
