fold:                                   ; @fold
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_branch .LBB0_0
.LBB0_0:
	s_cbranch_scc1 .LBB0_2
	global_load_dwordx2 v[10:11], v[4:5], off
.LBB0_2:
	s_cbranch_scc1 .LBB0_4
	s_branch .LBB0_5
.LBB0_4:
.LBB0_5:
	s_cbranch_vccnz .LBB0_8
	v_lshl_add_u64 v[8:9], s[4:5], 0, v[8:9]
.LBB0_7:
	v_ashrrev_i32_e32 v1, 31, v0
	v_lshl_add_u64 v[18:19], v[8:9], 0, v[0:1]
	global_load_dwordx2 v[26:27], v[18:19], off
	s_waitcnt lgkmcnt(0)
	s_barrier
	ds_read2_b64 v[18:21], v15 offset1:4
	ds_read2_b64 v[22:25], v15 offset0:128 offset1:132
	v_accvgpr_mov_b32 a13, a3
	v_accvgpr_mov_b32 a12, a2
	v_accvgpr_mov_b32 a11, a1
	v_accvgpr_mov_b32 a10, a0
	s_waitcnt lgkmcnt(1)
	v_mfma_f32_16x16x32_fp8_fp8 a[2:5], v[18:19], v[2:3], 0
	ds_read_b64_tr_b8 v[18:19], v16
	s_add_i32 s0, s0, 32
	v_add_u32_e32 v0, 0x800, v0
	s_waitcnt lgkmcnt(1)
	v_mfma_f32_16x16x32_fp8_fp8 a[6:9], v[22:23], v[2:3], 0
	s_cmp_lt_i32 s0, s2
	s_waitcnt lgkmcnt(0)
	s_barrier
	v_mfma_f32_16x16x32_fp8_fp8 a[0:3], v[20:21], v[4:5], a[2:5]
	s_waitcnt vmcnt(0)
	ds_write_b64 v14, v[26:27]
	v_mfma_f32_16x16x32_fp8_fp8 a[4:7], v[24:25], v[4:5], a[6:9]
	s_nop 4
	v_accvgpr_read_b32 v1, a0
	v_accvgpr_read_b32 v17, a1
	v_accvgpr_read_b32 v21, a3
	v_accvgpr_read_b32 v20, a2
	v_exp_f32_e32 v1, v1
	v_exp_f32_e32 v17, v17
	v_exp_f32_e32 v29, v21
	v_exp_f32_e32 v28, v20
	v_accvgpr_read_b32 v22, a4
	v_accvgpr_read_b32 v23, a5
	v_accvgpr_read_b32 v24, a6
	v_accvgpr_read_b32 v25, a7
	v_exp_f32_e32 v21, v22
	v_exp_f32_e32 v22, v23
	v_exp_f32_e32 v23, v24
	v_exp_f32_e32 v24, v25
	v_cvt_scalef32_pk_fp8_f32 v20, v1, v17, 1.0
	v_cvt_scalef32_pk_fp8_f32 v21, v21, v22, 1.0
	v_cvt_scalef32_pk_fp8_f32 v20, v28, v29, 1.0 op_sel:[0,0,0,1]
	v_cvt_scalef32_pk_fp8_f32 v21, v23, v24, 1.0 op_sel:[0,0,0,1]
	s_nop 1
	v_permlane32_swap_b32_e32 v20, v21
	s_nop 1
	v_permlane16_swap_b32_e32 v20, v21
	s_nop 1
	v_mfma_f32_16x16x32_fp8_fp8 a[0:3], v[18:19], v[20:21], a[10:13]
	s_cbranch_scc1 .LBB0_7
.LBB0_8:
	s_cbranch_scc1 .LBB0_10
	ds_read2_b64 v[18:21], v0 offset1:4
.LBB0_10:
	s_cbranch_vccnz .LBB0_12
	v_accvgpr_write_b32 a3, v17
.LBB0_12:
	s_endpgm
.Lfunc_end0:
  - .agpr_count:     14
    .private_segment_fixed_size: 0
    .sgpr_count:     20
    .sgpr_spill_count: 0
    .vgpr_count:     46
    .vgpr_spill_count: 0
; codeLenInByte = 1480
; Occupancy: 8
